"""Chains of real tiers under the replay engine, whose every answer shows all of its KV."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import RedisServer

from spec.chain import ChainSpec
from spec.load import load_chain
from tiers.connector.manager import StoreManager
from tiers.engine.replay import ReplayEngine, ReplayModel, answer
from tiers.gpu.copier import CpuCopier

MODEL = ReplayModel()
SLOT = 4096
"""Bytes of host pool that one of the model's small blocks takes."""


def chain_of(*tiers: dict[str, Any], **more: Any) -> ChainSpec:
    return load_chain({"version": 1, "staging": 64 * SLOT, "tiers": list(tiers), **more})


def cpu(blocks: int = 64, **more: Any) -> dict[str, Any]:
    return {"type": "cpu", "capacity": blocks * SLOT, **more}


def disk(path: Path, capacity: str = "1MiB", **more: Any) -> dict[str, Any]:
    return {"type": "disk", "path": str(path), "capacity": capacity, **more}


def redis(server: RedisServer, space: object, **more: Any) -> dict[str, Any]:
    return {"type": "redis", "url": server.url, "key_prefix": str(space), **more}


@pytest.fixture(autouse=True)
def patient_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not make misses of hits that a test counts on."""
    monkeypatch.setattr(StoreManager, "LOOKUP_DEADLINE", 30.0)


@pytest.fixture
def engine() -> Iterator[Callable[..., ReplayEngine]]:
    """Make engines; what they leave is checked, and they are closed, when the test is over."""
    engines: list[ReplayEngine] = []

    def make(chain: ChainSpec | None, **options: Any) -> ReplayEngine:
        engines.append(ReplayEngine(chain, MODEL, **options))
        return engines[-1]

    yield make
    for made in engines:
        close(made)


def close(engine: ReplayEngine) -> None:
    """Let transfers end; nothing may be left of the requests. Then shut down."""
    if engine.closed:
        return
    engine.settle()
    assert engine.scheduler.pool.num_free == engine.num_blocks
    for child in engine.connector.children if engine.connector else ():
        scheduler = child.scheduler
        assert not scheduler.reqs_being_loaded and not scheduler.blocks_being_stored
        assert scheduler.slots_pinned == 0
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


def test_the_model_shows_a_single_wrong_byte(engine: Callable[..., ReplayEngine]) -> None:
    """Without this, none of the tests below would prove anything."""
    prompt = list(range(20))
    plain = engine(None)
    plain.generate(prompt, 4)
    for layer in plain.workers[0].kv.values():
        layer.view(-1)[10] += 1
    assert plain.generate(prompt, 4).output != answer(MODEL, prompt, 4)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("processes", [False, True], ids=["one process", "own processes"])
@pytest.mark.parametrize("kind", ["cpu", "disk", "redis", "all"])
def test_answers_are_those_of_an_engine_without_tiers(
    engine: Callable[..., ReplayEngine],
    tmp_path: Path,
    shared_server: RedisServer,
    kind: str,
    processes: bool,
    prefix_caching: bool,
) -> None:
    tiers = {
        "cpu": cpu(20),
        "disk": disk(tmp_path / "disk", "160KiB"),
        "redis": redis(shared_server, tmp_path),
    }
    chain = chain_of(*(tiers.values() if kind == "all" else [tiers[kind]]))
    made = engine(chain, num_blocks=24, prefix_caching=prefix_caching, processes=processes)
    drive(made, seed=1)
    made.settle()
    drive(made, seed=1)
    assert sum(c.get("loaded_tokens", 0) for c in made.stats.data.values()) > 0


@pytest.mark.parametrize("seed", range(5))
def test_aborts_in_the_middle_of_loads_and_stores(
    engine: Callable[..., ReplayEngine], tmp_path: Path, shared_server: RedisServer, seed: int
) -> None:
    chain = chain_of(cpu(12), disk(tmp_path, "160KiB"), redis(shared_server, tmp_path))
    drive(engine(chain, num_blocks=24, prefix_caching=False), seed, abort=0.4)


class LateGathers(CpuCopier):
    """Gathers that begin when the engine has long gone on."""

    def _gather(self, *args: Any) -> None:
        time.sleep(0.01)
        super()._gather(*args)


@pytest.mark.parametrize("seed", range(3))
def test_blocks_are_not_overwritten_while_they_are_gathered(
    engine: Callable[..., ReplayEngine], tmp_path: Path, seed: int
) -> None:
    chain = chain_of(cpu(30), disk(tmp_path / "one"), disk(tmp_path / "two"))
    made = engine(chain, num_blocks=24, open_copier=LateGathers)
    for _ in range(2):
        drive(made, seed, abort=0.4)
        made.settle()


def test_preempted_requests_come_back(engine: Callable[..., ReplayEngine], tmp_path: Path) -> None:
    made = engine(chain_of(cpu(30), disk(tmp_path)), num_blocks=24, prefix_caching=False)
    prompts = [[n] * 20 for n in range(8)]
    requests = [made.add(prompt, 40) for prompt in prompts]
    made.run()
    assert made.scheduler.preemptions > 0
    assert made.stats["cpu"]["loaded_tokens"] > 0, "their own blocks are loaded again"
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output == answer(MODEL, prompt, 40)


@pytest.mark.parametrize("processes", [False, True], ids=["one process", "own processes"])
def test_two_ranks(
    engine: Callable[..., ReplayEngine],
    tmp_path: Path,
    shared_server: RedisServer,
    processes: bool,
) -> None:
    chain = chain_of(cpu(40), disk(tmp_path), redis(shared_server, tmp_path))
    made = engine(chain, num_blocks=24, world_size=2, processes=processes)
    drive(made, seed=3, world_size=2)
    made.settle()
    drive(made, seed=3, world_size=2)
    assert sum(c.get("loaded_tokens", 0) for c in made.stats.data.values()) > 0


def test_a_restart_finds_the_disk_as_it_was(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    prompt = list(range(50))
    chain = chain_of(cpu(), disk(tmp_path))
    first = engine(chain)
    first.generate(prompt, 3)
    close(first)
    again = engine(chain).generate(prompt, 3)
    assert again.output == answer(MODEL, prompt, 3)
    assert again.loaded_tokens == 48


def test_a_replica_finds_what_another_stored(
    engine: Callable[..., ReplayEngine], tmp_path: Path, shared_server: RedisServer
) -> None:
    prompt = list(range(50))
    shared = redis(shared_server, tmp_path)
    one = engine(chain_of(cpu(), disk(tmp_path / "one"), shared))
    one.generate(prompt, 3)
    one.settle()
    two = engine(chain_of(cpu(), disk(tmp_path / "two"), shared))
    assert two.generate(prompt, 3).loaded_tokens == 48
    two.settle()
    assert two.stats["redis"]["loaded_tokens"] == 48
    assert two.stats["disk"]["stored_blocks"] == two.stats["cpu"]["stored_blocks"] == 13


def test_promote_false_keeps_loaded_blocks_where_they_were(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    prompt = list(range(50))
    first = engine(chain_of(disk(tmp_path)))
    first.generate(prompt, 1)
    close(first)
    again = engine(chain_of(cpu(), disk(tmp_path), promote=False))
    assert again.generate(prompt, 1).loaded_tokens == 48
    again.settle()
    assert again.stats["cpu"].get("stored_blocks", 0) == 0


@pytest.mark.parametrize("change", ["facts", "salt", "request salt", "block size", "ranks"])
def test_engines_that_differ_never_share_a_block(
    engine: Callable[..., ReplayEngine], tmp_path: Path, change: str
) -> None:
    prompt = list(range(64))
    chain = chain_of(disk(tmp_path))
    first = engine(chain)
    first.generate(prompt, 1)
    close(first)
    options: dict[str, Any] = {}
    if change == "facts":
        options["facts"] = {"model": "another"}
    elif change == "salt":
        chain = chain_of(disk(tmp_path), salt="ours")
    elif change == "ranks":
        options["world_size"] = 2
    model = ReplayModel(block_tokens=8) if change == "block size" else MODEL
    other = ReplayEngine(chain, model, **options)
    request = other.generate(prompt, 1, salt="tenant" if change == "request salt" else "")
    other.close()
    assert request.loaded_tokens == 0
    assert request.output == answer(model, prompt, 1, options.get("world_size", 1))


def test_redis_dies_and_comes_back(
    engine: Callable[..., ReplayEngine], tmp_path: Path, server: RedisServer
) -> None:
    made = engine(chain_of(cpu(8), redis(server, tmp_path, timeout="200ms")), num_blocks=24)
    drive(made, seed=1)
    server.kill()
    drive(made, seed=2)
    server.start()
    drive(made, seed=3)


def test_slabs_are_damaged_while_the_engine_runs(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    made = engine(chain_of(disk(tmp_path)), num_blocks=24, prefix_caching=False)
    drive(made, seed=1)
    made.settle()
    for slab in tmp_path.glob("slab-*"):
        with slab.open("r+b") as file:
            for position in range(600, slab.stat().st_size, 3 * SLOT):
                file.seek(position)
                file.write(b"\xff\xee\xdd")
    drive(made, seed=1)
    assert made.stats["disk"]["load_failures"] > 0


def test_more_work_than_the_host_pool_holds(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    chain = chain_of(cpu(2), disk(tmp_path), staging=3 * SLOT)
    made = engine(chain, num_blocks=24)
    drive(made, seed=4)
    assert sum(c.get("store_dropped", 0) for c in made.stats.data.values()) > 0


def test_a_chain_whose_every_tier_is_unusable(
    engine: Callable[..., ReplayEngine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    made = engine(chain_of({"type": "cpu", "capacity": 64}, disk(tmp_path / "file")), num_blocks=24)
    drive(made, seed=1)
    unusable = [r.getMessage() for r in caplog.records if "unusable" in r.getMessage()]
    assert len(unusable) == 2, "each is reported once"
    assert "'cpu'" in unusable[0] and "less than one block" in unusable[0]
    assert "'disk'" in unusable[1] and str(tmp_path / "file") in unusable[1]
