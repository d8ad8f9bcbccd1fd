"""Chains of real tiers under the replay engine, whose every answer shows all of its KV."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from spec.chain import LOAD_POLICIES
from tests.support.replay import ReplayEngine, ReplayModel, answer
from tests.support.replay_chains import (
    MODEL,
    SLOT,
    chain_of,
    close,
    cpu,
    disk,
    drive,
    measured,
    redis,
    total,
)
from tests.support.servers import RedisServer
from tiers.connector.multi.multi_scheduler import MultiScheduler, MultiSettings
from tiers.connector.multi.multi_worker import MultiWorker
from tiers.connector.policy.request_table import RequestTable
from tiers.contract.engine_info import EngineInfo
from tiers.errors import KVTiersError
from tiers.gpu.copier import CpuCopier
from tiers.lab.replay import engine as plain_engine
from tiers.lab.replay import model as plain
from tiers.lab.replay.worker import LocalWorker
from tiers.store import Block
from tiers.testing import GivenSpec, MemoryStore


def test_the_model_shows_a_single_wrong_byte(engine: Callable[..., ReplayEngine]) -> None:
    """Without this, none of the tests below would prove anything."""
    prompt = list(range(20))
    plain = engine(None)
    plain.generate(prompt, 4)
    worker: Any = plain.workers[0]
    for layer in worker.kv.values():
        layer.view(-1)[10] += 1
    assert plain.generate(prompt, 4).output != answer(MODEL, prompt, 4)


def test_so_does_that_of_try() -> None:
    """It computes in steps of two blocks here."""
    prompt, model = list(range(20)), plain.ReplayModel()
    info = EngineInfo({}, model.block_tokens, model.block_tokens, 16, step_tokens=8)
    connector = MultiScheduler((), MultiSettings(RequestTable(info)), (), "")
    worker = LocalWorker(model, info.num_blocks, MultiWorker(()))
    engine = plain_engine.ReplayEngine(model, info, connector, worker)
    assert engine.generate(prompt, 4).output == plain.answer(model, prompt, 4)
    assert plain.answer(model, prompt, 4) == answer(MODEL, prompt, 4)
    for layer in worker.kv.values():
        layer.view(-1)[10] += 1
    assert engine.generate(prompt, 4).output != plain.answer(model, prompt, 4)
    engine.close()


CHAINS = [("cpu", "first"), ("disk", "first"), ("redis", "first")]
CHAINS += [("all", load) for load in LOAD_POLICIES]


@pytest.mark.parametrize(
    ("kind", "load", "processes", "prefix_caching"),
    [
        *((*chain, False, number % 2 == 1) for number, chain in enumerate(CHAINS)),
        (*CHAINS[-1], False, False),
        # Processes of their own take seconds to start.
        (*CHAINS[-1], True, False),
    ],
)
def test_answers_are_those_of_an_engine_without_tiers(
    engine: Callable[..., ReplayEngine],
    tmp_path: Path,
    shared_server: RedisServer,
    kind: str,
    load: str,
    processes: bool,
    prefix_caching: bool,
) -> None:
    tiers = {
        "cpu": cpu(20),
        "disk": disk(tmp_path / "disk", "160KiB"),
        "redis": redis(shared_server, tmp_path),
    }
    chain = chain_of(*(tiers.values() if kind == "all" else [tiers[kind]]), load_policy=load)
    made = engine(chain, num_blocks=24, prefix_caching=prefix_caching, processes=processes)
    drive(made, seed=1)
    made.settle()
    drive(made, seed=1)
    assert total(made, "loaded_tokens") > 0


@pytest.mark.parametrize("seed", range(2))
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


@pytest.mark.parametrize("seed", range(2))
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
    assert measured(made, "reloaded_tokens", "cpu") > 0, "their own blocks are loaded again"
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
    assert total(made, "loaded_tokens") > 0


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
    assert measured(two, "loaded_tokens", "redis") == 48
    assert measured(two, "stored_blocks", "disk") == measured(two, "stored_blocks", "cpu") == 13


@pytest.mark.parametrize("tokens", [50, 48])
def test_promote_false_keeps_loaded_blocks_where_they_were(
    engine: Callable[..., ReplayEngine], tmp_path: Path, tokens: int
) -> None:
    """Also the last one of a prompt that is loaded whole, whose last token is computed again."""
    prompt = list(range(tokens))
    first = engine(chain_of(disk(tmp_path)))
    first.generate(prompt, 1)
    close(first)
    again = engine(chain_of(cpu(), disk(tmp_path), promote=False))
    assert again.generate(prompt, 1).loaded_tokens == 48
    again.settle()
    assert measured(again, "stored_blocks", "cpu") == 0


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
            for position in range(4184, slab.stat().st_size, 3 * SLOT):
                file.seek(position)
                file.write(b"\xff\xee\xdd")
    drive(made, seed=1)
    assert measured(made, "load_failures", "disk") > 0


def test_more_work_than_the_host_pool_holds(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    chain = chain_of(cpu(2), disk(tmp_path), staging=3 * SLOT)
    made = engine(chain, num_blocks=24)
    drive(made, seed=4)
    assert total(made, "store_dropped_no_slot") > 0


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


def test_a_store_that_hangs_ends_a_try_with_a_reason_and_no_traceback(
    engine: Callable[..., ReplayEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    class Hangs(MemoryStore):
        def put(self, blocks: Sequence[Block]) -> list[bool]:
            go_on.wait(60)
            return super().put(blocks)

    monkeypatch.setattr("tiers.lab.replay.engine.SETTLE_SECONDS", 0.2)
    chain = chain_of(cpu())
    hanging = GivenSpec(type="given").over(Hangs())
    made = engine(chain.model_copy(update={"tiers": (*chain.tiers, hanging)}))
    made.generate(list(range(20)), 1)
    with pytest.raises(KVTiersError, match="transfers do not end"):
        made.settle()
    monkeypatch.undo()
    go_on.set()


@pytest.mark.parametrize("model", [MODEL, ReplayModel(windows=(None, 14, 7))], ids=["", "hybrid"])
def test_the_block_that_a_last_token_completes_is_stored(
    engine: Callable[..., ReplayEngine], tmp_path: Path, model: ReplayModel
) -> None:
    """The engine learns of a step's tokens when the next step is on its way, as vLLM's does."""
    made = engine(chain_of(cpu(90), disk(tmp_path)), model=model, num_blocks=99)
    prompt = list(range(42))
    made.generate(prompt, 7)  # 48 tokens are computed: 12 blocks; the 49th is sampled
    made.settle()
    made.scheduler.pool.forget_all()
    assert made.generate(answered := prompt + answer(model, prompt, 7), 2).loaded_tokens == 48
    made.scheduler.pool.forget_all()
    assert made.generate([*answered, 5], 2).output == answer(model, [*answered, 5], 2)


def test_a_last_block_that_the_engine_gives_away_at_once_is_not_stored(
    engine: Callable[..., ReplayEngine],
) -> None:
    made = engine(chain_of(cpu(90)), num_blocks=13)
    prompt = list(range(42))
    made.add(prompt, 7)
    others = [made.add([500 + n] * 45, 2) for n in range(3)]  # each takes all blocks there are
    made.run()
    made.scheduler.pool.forget_all()
    answered = [*prompt, *answer(MODEL, prompt, 7)]
    again = made.generate(answered, 2)
    assert again.loaded_tokens == 44
    assert again.output == answer(MODEL, answered, 2)
    for number, other in enumerate(others):
        assert other.output == answer(MODEL, [500 + number] * 45, 2)
