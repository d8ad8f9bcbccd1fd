"""Chains of small tiers, and workloads for the replay engine to run over them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from spec.chain import ChainSpec
from spec.load import load_chain
from spec.offloading import StoreContext
from tests.support.replay import ReplayEngine, ReplayModel, ReplayRequest, answer
from tests.support.replay.tables import STATE
from tests.support.servers import RedisServer
from tiers.connector.multi.changes import AbsentTier
from tiers.connector.scheduler.offloading_scheduler import OffloadingScheduler
from tiers.contract.block_groups import GROUP_BYTES
from tiers.contract.marks import RequestMark, RequestMarks
from tiers.disk.disk_store import DiskStore

MODEL = ReplayModel()
DENSE = ReplayModel(windows=(None, 14, 7))
HYBRID = replace(DENSE, window_interval=0)
"""As vLLM by default, what windows reach is kept where prefixes end; of the other, everywhere."""
WINDOWS = ReplayModel(windows=(14,))
RECURRENT = ReplayModel(windows=(None, STATE, STATE))
SLOT = 4096
"""Bytes of host pool that one of the model's small blocks takes."""


class Marked(RequestMarks):
    """Gives all requests the mark that is there when they come."""

    def __init__(self, mark: Callable[[], bytes]) -> None:
        self._mark = mark

    def of(self, request: Any) -> RequestMark:
        mark = self._mark()
        return RequestMark([(0, mark)] if mark else [])


def chain_of(*tiers: dict[str, Any], **more: Any) -> ChainSpec:
    """A chain that loads whatever it has, unless a test says otherwise: these engines compute a
    token sooner than any tier brings it."""
    whole = {"version": 1, "staging": 64 * SLOT, "tiers": list(tiers), "load_when": "always"}
    return load_chain({**whole, **more})


def cpu(blocks: int = 64, **more: Any) -> dict[str, Any]:
    return {"type": "cpu", "capacity": blocks * SLOT, **more}


def disk(path: Path, capacity: str = "1MiB", **more: Any) -> dict[str, Any]:
    return {"type": "disk", "path": str(path), "capacity": capacity, **more}


def redis(server: RedisServer, space: object, **more: Any) -> dict[str, Any]:
    # A busy machine must not make misses of hits that a test counts on.
    patient = {"timeout": "30s", **more}
    return {"type": "redis", "url": server.url, "key_prefix": str(space), **patient}


def encryption(folder: Path) -> dict[str, Any]:
    """A tier's settings to encrypt its blocks under a key in this folder."""
    (folder / "keys").write_text("ab" * 32)
    return {"encryption": {"key_file": str(folder / "keys")}}


def crowded(
    path: Path, server: RedisServer, world_size: int, cpu_blocks: int = 12, **more: Any
) -> ChainSpec:
    """Three tiers, of which the first two hold a part of what `workload` asks."""
    small = f"{160 * world_size}KiB"
    tiers = cpu(cpu_blocks * world_size), disk(path, small), redis(server, path)
    return chain_of(*tiers, **more)


def measured(engine: ReplayEngine, name: str, tier: str = "slow") -> float:
    """The value of one of the tier's counters or gauges."""
    value = engine.stats.data.get(tier, {}).get(name, 0.0)
    assert not isinstance(value, list), f"{name} is a histogram"
    return value


def total(engine: ReplayEngine, name: str) -> float:
    """The sum of one of the counters over all tiers."""
    return sum(measured(engine, name, tier) for tier in engine.stats.data)


def coverage_of(engine: ReplayEngine, request: ReplayRequest) -> Sequence[int]:
    """How much of each full block of a request the first tier holds."""
    assert engine.connector is not None
    requests = engine.connector._requests
    found = scheduler_of(engine).coverage(requests.of(request), range(len(request.block_hashes)))
    requests.forget(request)
    assert found is not None
    return found


def scheduler_of(engine: ReplayEngine, place: int = 0) -> OffloadingScheduler:
    """The scheduler half of the chain's tier at this place."""
    assert engine.connector is not None
    child = engine.connector.children[place]
    assert isinstance(child, OffloadingScheduler)
    return child


def close(engine: ReplayEngine) -> None:
    """Let transfers end; nothing may be left of the requests. Then shut down."""
    if engine.closed:
        return
    engine.settle()
    assert engine.scheduler.pool.num_free == engine.num_blocks
    assert engine.connector is None or not engine.connector._requests._states
    for child in engine.connector.children if engine.connector else ():
        assert isinstance(child, OffloadingScheduler | AbsentTier)  # a tier that left is absent
        if isinstance(child, OffloadingScheduler):
            assert not child._jobs.any_loading and not child._stores.slots_pinned
    engine.close()


def workload(seed: int, count: int = 60) -> list[tuple[list[int], int]]:
    """Prompts that share prefixes, and how many tokens to answer."""
    rng = random.Random(seed)
    roots = [[rng.randrange(1000) for _ in range(rng.randrange(5, 60))] for _ in range(6)]
    return [
        (
            rng.choice(roots) + [rng.randrange(1000) for _ in range(rng.randrange(1, 10))],
            rng.randrange(1, 8),
        )
        for _ in range(count)
    ]


def drive(engine: ReplayEngine, seed: int, abort: float = 0.0, world_size: int = 1) -> None:
    """Run a workload, several requests at once; every answer that ends must be right."""
    rng = random.Random(seed)
    requests = []
    for prompt, max_tokens in workload(seed):
        requests.append((engine.add(prompt, max_tokens), prompt))
        for _ in range(rng.randrange(3)):
            engine.step()
        if rng.random() < abort:
            engine.scheduler.abort(rng.choice(requests)[0].request_id)
    engine.run()
    for request, prompt in requests:
        expected = answer(MODEL, prompt, request.max_tokens, world_size)
        assert request.output == expected[: len(request.output)], request.request_id
        if not abort:
            assert len(request.output) == request.max_tokens


def names(engine: ReplayEngine, hashes: Iterable[bytes], group: int = 0) -> list[bytes]:
    """What stores call these blocks, of all ranks."""
    suffix = group.to_bytes(GROUP_BYTES, "little")
    said = [worker.handshake().metadata[-1].namespace for worker in engine.workers]
    return [space + block_hash + suffix for space in said for block_hash in hashes]


def drop_from_disk(folder: Path, keys: list[bytes]) -> None:
    """Take blocks out of a disk tier, behind the engine's back."""
    store = DiskStore(folder, 1 << 20, StoreContext(MODEL.payload_bytes))
    assert all(store.has(keys)), "nothing to drop"
    store.drop(keys)
    store.close()


def damage_disk(folder: Path) -> None:
    """Change bytes of every block that a disk tier holds."""
    for slab in folder.glob("slab-*"):
        with slab.open("r+b") as file:
            for position in range(4184, slab.stat().st_size, SLOT):
                file.seek(position)
                file.write(b"\xff\xee\xdd")


def asked_twice(chain: ChainSpec, tier: str) -> float:
    """Tokens that a tier brings to a prompt that is asked for again; both answers are right."""
    # It computes a token sooner than a slow machine's tier brings it.
    always = chain.model_copy(update={"load_when": "always"})
    engine = ReplayEngine(always, MODEL, prefix_caching=False)
    prompt = list(range(100))
    try:
        for _ in range(2):
            assert engine.generate(prompt, 4).output == answer(MODEL, prompt, 4)
            engine.settle()
        return measured(engine, "loaded_tokens", tier)
    finally:
        close(engine)
