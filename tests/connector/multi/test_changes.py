"""A chain changes while its engine runs: on all ranks at once, or not at all."""

from __future__ import annotations

import errno
import logging
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spec import plugins
from spec.chain import ChainSpec
from tests.disk.audit import handles_of
from tests.engine.identity.test_facts import Facts
from tests.support.changing import (
    ask_for,
    change,
    changes_of,
    finish,
    running,
    served,
    tiers_of,
    until_open,
)
from tests.support.lacking import refuse_threads
from tests.support.process_worker import ProcessWorker
from tests.support.replay import ReplayEngine, answer
from tests.support.replay_chains import (
    MODEL,
    chain_of,
    cpu,
    disk,
    measured,
    redis,
    scheduler_of,
    workload,
)
from tests.support.servers import RedisServer, free_port
from tests.support.topologies import wait_until
from tiers.connector import observers
from tiers.connector.multi import changes
from tiers.connector.scheduler.offloading_scheduler import OffloadingScheduler
from tiers.connector.worker.host_slots import HostSlots
from tiers.connector.worker.offloading_worker import OffloadingWorker
from tiers.contract.changes import ChangeReport
from tiers.contract.messages import WorkerHandshake
from tiers.contract.stats import GAUGES, STATES
from tiers.control.status_board import StatusBoard
from tiers.disk.disk_store import DiskStore
from tiers.errors import TierUnusable
from tiers.traces.recorder import Recorder, Recording

PROMPT = [token % 997 for token in range(40 * MODEL.block_tokens + 1)]
TOO_SMALL = "5KiB"
WHOLE = 40 * MODEL.block_tokens


def both(path: Path, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return cpu(256), disk(path, **more)


def worker_changes(engine: ReplayEngine, rank: int) -> Any:
    return engine.workers[rank].connector._chain_changes  # type: ignore[attr-defined]


def test_the_order_and_the_policy_take_effect_in_one_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = both(tmp_path)
    caplog.set_level(logging.INFO)
    with running(chain_of(a, b, load_policy="first")) as engine:
        served(engine, PROMPT)
        assert served(engine, PROMPT) == {"cpu": WHOLE}
        pending = ask_for(engine, chain_of(b, a, load_policy="first"))
        assert not pending.wait(0)
        engine.step()
        assert pending.wait(0) and (pending.version, pending.why) == (2, "")
        assert "has version 2: load priority disk, cpu" in caplog.text
        assert served(engine, PROMPT) == {"disk": WHOLE}
        change(engine, chain_of(a, b, load_policy="longest"))
        assert served(engine, PROMPT) == {"cpu": WHOLE}
        assert changes_of(engine).version == 3


def test_settings_of_a_tier_and_of_the_chain(tmp_path: Path) -> None:
    a, b = both(tmp_path)
    with running(chain_of(a, b)) as engine:
        slow = {**b, "store_threshold": 3, "store_rate": "1GB/s", "deadline": "77s"}
        rules = {"store": "prompt", "max_wait": "3s", "load_when": "sooner", "max_retained": 0.5}
        assert not change(engine, chain_of(a, slow, **rules)).why
        served(engine, PROMPT)
        assert measured(engine, "stored_blocks", "cpu") > 0
        assert not measured(engine, "stored_blocks", "disk"), "its third request is to come"
        for worker in engine.workers:
            half: Any = worker.connector.children[1]  # type: ignore[attr-defined]
            assert half._rate_limit.rate == 1e9 / 2
            assert {lane.deadline for lane in half._store._lanes} == {77.0}
        assert engine.connector is not None
        assert engine.connector._requests._max_wait == 3.0
        assert not engine.connector._comparison.always


def test_a_tier_leaves_and_comes_back_with_its_blocks(tmp_path: Path) -> None:
    """Each rank in a process of its own, so that all that crosses is pickled."""
    a, b = cpu(8), disk(tmp_path)
    with running(chain_of(a, b), make_worker=ProcessWorker) as engine:
        served(engine, PROMPT)
        assert served(engine, PROMPT)["disk"] > 0
        assert not change(engine, chain_of(a)).why
        assert [type(child).__name__ for child in engine.connector.children][1] == "AbsentTier"
        assert not list((tmp_path / "owners").glob("*")), "no process has the folder open"
        assert "disk" not in served(engine, PROMPT)
        assert measured(engine, "tier_state", "disk") == STATES.index("detached")
        last = {name: measured(engine, name, "disk") for name in GAUGES}
        assert last == dict.fromkeys(GAUGES, 0.0), "nothing is shown as it was"
        assert not change(engine, chain_of(a, b)).why
        assert served(engine, PROMPT)["disk"] > 0
        assert measured(engine, "tier_state", "disk") == STATES.index("open")
        assert len(engine.connector.children) == 2, "it has its place again"


def test_several_tiers_come_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disks = [disk(tmp_path / name, name=name) for name in ("fast", "large")]
    opened: list[list[int]] = []
    open_ahead = OffloadingScheduler.open_ahead

    def noted(tier: OffloadingScheduler, handshakes: Sequence[WorkerHandshake]) -> None:
        opened.append([shake.rank for shake in handshakes])
        open_ahead(tier, handshakes)

    monkeypatch.setattr(OffloadingScheduler, "open_ahead", noted)
    with running(chain_of(cpu(8))) as engine:
        for _ in range(2):
            assert not change(engine, chain_of(cpu(8), *disks)).why
            served(engine, PROMPT)
            assert all(measured(engine, "stored_blocks", name) for name in ("fast", "large"))
            assert not change(engine, chain_of(cpu(8))).why
        assert not change(engine, chain_of(cpu(8), load_policy="first")).why
        left = engine.connector.children[1:]
        assert [type(child).__name__ for child in left] == ["AbsentTier"] * 2, "they stay away"
    assert opened == [[0, 1]] * 4, "for each rank once"


@pytest.fixture(params=[(OffloadingScheduler, "shutdown"), (OffloadingWorker, "detach")])
def closes(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[threading.Event]:
    """Until it is set no tier of a scheduler closes, or of no rank, and changes do not wait for one
    that does."""
    half, verb = request.param
    closes, close = threading.Event(), getattr(half, verb)

    def slowly(tier: Any) -> None:
        assert closes.wait(60)
        close(tier)

    monkeypatch.setattr(half, verb, slowly)
    monkeypatch.setattr(changes, "DRAIN_SECONDS", 0.0)
    yield closes
    closes.set()


def step_until(engine: ReplayEngine, is_so: Callable[[], bool]) -> None:
    def stepped() -> bool:
        engine.step()
        return is_so()

    wait_until(stepped)


def until_left(engine: ReplayEngine) -> None:
    """Step until no tier is leaving."""
    step_until(engine, lambda: not changes_of(engine)._leaving)


def test_a_tier_that_is_slow_to_close_keeps_no_other_change_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closes: threading.Event
) -> None:
    a, b = both(tmp_path)
    with running(chain_of(a, b)) as engine:
        served(engine, PROMPT)
        left = change(engine, chain_of(a))
        assert (left.why, left.remains) == ("", ("disk",))
        leaving = changes_of(engine)._leaving[1]
        step_until(engine, lambda: len(leaving.left) == 2 or bool(leaving.closing.done()))  # type: ignore[union-attr]
        engine.step()  # the ranks have closed it, or the scheduler has
        assert "still has blocks in flight" in ask_for(engine, chain_of(a, b)).why
        monkeypatch.setattr(changes, "DRAIN_SECONDS", 60.0)
        other = ask_for(engine, chain_of(a, load_policy="first"))
        engine.step()
        assert other.wait(0) and not other.remains
        assert changes_of(engine).waits, "an engine that idles would not hear of its end"
        closes.set()
        until_left(engine)
        assert not change(engine, chain_of(a, b)).why


def test_a_tier_that_is_to_be_opened_anew_and_does_not_close_is_left_out(
    tmp_path: Path, closes: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = both(tmp_path)
    with running(chain_of(a, b)) as engine:
        pending = change(engine, chain_of(a, {**b, "durability": "sync"}))
        assert "tier disk has not closed" in pending.why and pending.version == 2
        assert pending.in_part
        assert f"a change of the chain was made in part: {pending.why}" in caplog.text
        assert changes_of(engine).chain == chain_of(a)
        closes.set()
        until_left(engine)
        assert not change(engine, chain_of(a, b)).why


def test_a_tier_that_leaves_ends_what_it_has_in_flight_and_stores_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a, b), rules = both(tmp_path), {"max_retained": 0.5}
    with running(chain_of(a, b, **rules)) as engine:
        engine.generate(PROMPT, 1, "", {"kvtiers": {"hints": {"retain": {"ttl": 60}}}})
        engine.settle()
        engine.step()
        assert measured(engine, "retained_blocks", "disk") > 0
        with monkeypatch.context() as busy:
            busy.setattr(OffloadingScheduler, "jobs_in_flight", 1)
            busy.setattr(changes, "DRAIN_SECONDS", 0.0)
            assert change(engine, chain_of(a, **rules)).remains == ("disk",)
            before = measured(engine, "stored_blocks", "disk")
            engine.generate(PROMPT[::-1], 2)
            assert scheduler_of(engine, 1).condition()[0] == "open"
        engine.settle()
        until_left(engine)
        assert measured(engine, "stored_blocks", "disk") == before
        for gauge in ("reads_up", "writes_up", "capacity_bytes", "used_bytes", "retained_blocks"):
            assert measured(engine, gauge, "disk") == 0, gauge


def test_the_process_of_checksums_leaves_with_the_last_tier_that_asks_for_it(
    tmp_path: Path,
) -> None:
    a, b = both(tmp_path, store_process="always")
    with running(chain_of(a)) as engine:
        served(engine, PROMPT)
        assert not change(engine, chain_of(a, b)).why
        workers: Any = engine.workers
        computed = [worker.connector.children[0]._host.checksums for worker in workers]
        wait_until(lambda: all(one._process is not None for one in computed))
        assert not change(engine, chain_of(a)).why
        wait_until(lambda: all(one._process is None for one in computed))
        assert not change(engine, chain_of(a, b)).why
        wait_until(lambda: all(one._process is not None for one in computed))


def test_the_engines_thread_looks_at_no_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading what hundreds of them provide takes 12 ms a tier, on a busy file system seconds; and
    what it raises, as for want of descriptors, would end the engine."""
    with running(chain_of(cpu())) as engine:
        pending = ask_for(engine, chain_of(cpu(), disk(tmp_path, store_threshold=2)))

        def refused(*_: object) -> None:
            raise OSError(errno.EMFILE, "too many open files")

        monkeypatch.setattr(plugins, "entries_of", refused)
        finish(engine, pending)
        assert not pending.why


@pytest.mark.parametrize(
    ("change", "thread"), [("comes", ""), ("comes", "watch"), ("leaves", ""), ("is recorded", "")]
)
@pytest.mark.fault
def test_a_process_that_has_no_thread_left_serves_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, thread: str
) -> None:
    """As in a container at its limit of processes: who changes a chain begins threads. `thread`:
    those whose names begin so can't be had."""
    a, b = cpu(64), disk(tmp_path / "disk")
    before, after = {
        "comes": (chain_of(a), chain_of(a, b)),
        "leaves": (chain_of(a, b), chain_of(a)),
        "is recorded": (chain_of(a), chain_of(a, record={"path": str(tmp_path / "record")})),
    }[change]
    with running(before) as engine:
        served(engine, PROMPT)
        pending = ask_for(engine, after)
        with monkeypatch.context() as lacking:
            refuse_threads(lacking, lambda some: some.name.startswith(f"kvtiers-{thread}"))
            finish(engine, pending)
            assert served(engine, PROMPT)["cpu"] > 0
        assert ("can't start new thread" in pending.why) == (change == "comes")
        assert "TierUnusable" not in pending.why
        engine.settle()
        engine.close()
        wait_until(lambda: not list((tmp_path / "disk" / "owners").glob("*")))


@pytest.mark.parametrize("lacking", ["record", "ghosts", "reopen_0"])
@pytest.mark.fault
def test_a_start_that_finds_no_thread_to_record_or_count_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacking: str
) -> None:
    refuse_threads(monkeypatch, lambda some: some.name == f"kvtiers-{lacking}")
    record = {"record": {"path": str(tmp_path / "record")}}
    both = chain_of(cpu(64), ghosts=[{"tier": "cpu", "capacity": "2x"}], **record)
    with running(both) as engine:
        assert engine.connector is not None
        assert len(engine.connector._observers) == 2 - (lacking != "reopen_0")
        served(engine, PROMPT)
        assert not change(engine, chain_of(cpu(64))).why
        assert ("can't start new thread" in caplog.text) and served(engine, PROMPT)["cpu"] > 0


def test_reads_and_writes_of_a_tier_pause(tmp_path: Path) -> None:
    a, b = both(tmp_path)
    with running(chain_of({**a, "paused": "reads"}, b), ranks=1) as engine:
        served(engine, PROMPT)
        assert served(engine, PROMPT) == {"disk": WHOLE}
        assert not change(engine, chain_of({**a, "paused": "writes"}, b)).why
        assert served(engine, PROMPT) == {"cpu": WHOLE}
        before = measured(engine, "stored_blocks", "cpu")
        served(engine, [*PROMPT, *range(30)])
        assert measured(engine, "stored_blocks", "cpu") == before
        assert not change(engine, chain_of({**a, "paused": "both"}, b)).why
        assert served(engine, [*PROMPT, *range(30)]).keys() == {"disk"}
        assert not change(engine, chain_of(a, b)).why
        assert "cpu" in served(engine, PROMPT)


def test_reads_that_go_on_are_planned_as_those_of_a_start(tmp_path: Path) -> None:
    small, other = cpu(16), disk(tmp_path)
    with running(chain_of(small, other, load_policy="stitched"), ranks=1) as engine:
        served(engine, PROMPT)
        assert served(engine, PROMPT).keys() == {"cpu", "disk"}
        paused = [{**tier, "paused": "reads"} for tier in (small, other)]
        assert not change(engine, chain_of(*paused, load_policy="stitched")).why
        assert not served(engine, PROMPT)
        assert not change(engine, chain_of(small, other, load_policy="stitched")).why
        assert served(engine, PROMPT).keys() == {"cpu", "disk"}


def test_a_capacity_that_a_rank_refuses_is_named_with_its_tier(tmp_path: Path) -> None:
    a, b = both(tmp_path)
    with running(chain_of(a, b)) as engine:
        pending = change(engine, chain_of(a, {**b, "capacity": TOO_SMALL}))
        # Of the ranks that have answered by then: one, or both.
        refused = re.findall(r"rank [01]: (\S+ \S+ \S+)", pending.why)
        assert refused and {*refused} == {"tier disk: capacity"}, pending.why


def test_the_only_tier_is_opened_anew(tmp_path: Path) -> None:
    with running(chain_of(disk(tmp_path))) as engine:
        served(engine, PROMPT)
        assert not change(engine, chain_of(disk(tmp_path, io="buffered"))).why
        assert served(engine, PROMPT)["disk"] > 0


def test_one_that_fails_on_a_rank_is_closed_on_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = both(tmp_path / "disk")
    wrong = chain_of(disk(tmp_path / "other", TOO_SMALL)).tiers[0]
    with running(chain_of(a), ranks=2) as engine:
        served(engine, PROMPT)
        second = worker_changes(engine, 1)
        whole = second._parts
        second._parts = replace(whole, make=lambda tier: whole.make(wrong))
        pending = change(engine, chain_of(b, a))
        assert pending.version == 1 and "rank 1" in pending.why and TOO_SMALL in pending.why
        assert "goes on without it" not in pending.why, "the chain is as it was"
        assert not pending.in_part
        assert f"a change of the chain was refused: {pending.why}" in caplog.text
        assert changes_of(engine).chain == chain_of(a)
        for worker in engine.workers:
            assert len(worker.connector.children) == 1  # type: ignore[attr-defined]
        assert served(engine, PROMPT) == {"cpu": WHOLE}
        assert not change(engine, chain_of(a, load_policy="first")).why
        assert len(tiers_of(engine)) == 1, "another change does not bring it"
        wait_until(lambda: not list((tmp_path / "disk" / "owners").glob("*")))
        second._parts = whole
        assert not change(engine, chain_of(b, a)).why, "the folder is free again"
        assert served(engine, PROMPT) == {"cpu": WHOLE}
        assert served(engine, [*PROMPT, 5, 6, 7]).keys() <= {"cpu", "disk"}


def test_a_tier_is_opened_anew_for_what_it_takes_only_then(tmp_path: Path) -> None:
    a, b = cpu(8), disk(tmp_path)
    with running(chain_of(a, b)) as engine:
        served(engine, PROMPT)
        assert not change(engine, chain_of(a, {**b, "durability": "sync"})).why
        half: Any = engine.workers[1].connector.children[1]  # type: ignore[attr-defined]
        assert half._store.now()._folder.access.durability == "sync"
        assert served(engine, PROMPT)["disk"] > 0
        assert changes_of(engine).version == 2


def test_one_that_can_not_be_opened_anew_goes_back(tmp_path: Path) -> None:
    a, b = cpu(8), disk(tmp_path)
    small = disk(tmp_path, TOO_SMALL, durability="sync")
    with running(chain_of(a, b)) as engine:
        served(engine, PROMPT)
        pending = change(engine, chain_of(small, a, load_policy="first"))
        assert pending.version == 1 and "rank " in pending.why, "whichever was the first to tell"
        assert changes_of(engine).chain == chain_of(a, b)
        assert served(engine, PROMPT)["disk"] > 0


def test_one_that_goes_back_is_opened_when_what_was_refused_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank has its folder open with the settings that another part of the engine refused."""
    a, b = cpu(8), disk(tmp_path)
    open_ahead, close = OffloadingScheduler.open_ahead, DiskStore.close

    def refused(tier: OffloadingScheduler, handshakes: Sequence[WorkerHandshake]) -> None:
        if getattr(tier._spec, "durability", "") == "sync":
            raise TierUnusable("no")
        open_ahead(tier, handshakes)

    def slowly(store: DiskStore) -> None:
        time.sleep(0.1)
        close(store)

    with running(chain_of(a, b), ranks=1) as engine:
        served(engine, PROMPT)
        monkeypatch.setattr(OffloadingScheduler, "open_ahead", refused)
        monkeypatch.setattr(DiskStore, "close", slowly)
        pending = change(engine, chain_of(a, {**b, "durability": "sync"}))
        assert (pending.why, pending.version) == ("the scheduler: tier disk: no", 1)
        assert changes_of(engine).chain == chain_of(a, b)
        assert served(engine, PROMPT)["disk"] > 0


def test_one_that_can_neither_be_opened_anew_nor_go_back_is_left_out(tmp_path: Path) -> None:
    a, b = cpu(8), disk(tmp_path)
    wrong = chain_of(disk(tmp_path, TOO_SMALL)).tiers[0]
    with running(chain_of(a, b)) as engine:
        served(engine, PROMPT)
        first = worker_changes(engine, 0)
        whole = first._parts
        first._parts = replace(whole, make=lambda tier: whole.make(wrong))
        pending = change(engine, chain_of(a, {**b, "durability": "sync"}))
        assert "the chain goes on without it" in pending.why and TOO_SMALL in pending.why
        assert changes_of(engine).chain == chain_of(a) and pending.version == 2
        assert pending.in_part
        first._parts = whole
        for rank in range(2):  # the other may have begun to open it by now
            worker_changes(engine, rank)._closer.submit(int).result()
        wait_until(lambda: not list((tmp_path / "owners").glob("*")))
        assert not change(engine, chain_of(a, b)).why
        assert served(engine, PROMPT)["disk"] > 0


def test_a_server_that_is_down_joins_later(tmp_path: Path) -> None:
    port = free_port()
    gone = {"type": "redis", "url": f"redis://127.0.0.1:{port}/0", "timeout": "200ms"}
    with running(chain_of(cpu(8))) as engine:
        assert not change(engine, chain_of(cpu(8), gone)).why
        served(engine, PROMPT)
        assert not measured(engine, "stored_blocks", "redis")


def test_a_server_comes_and_goes(tmp_path: Path, shared_server: RedisServer) -> None:
    a, b = cpu(8), redis(shared_server, tmp_path)
    with running(chain_of(a)) as engine:
        assert not change(engine, chain_of(a, b)).why
        until_open(engine, "redis")
        served(engine, PROMPT)
        assert served(engine, PROMPT)["redis"] > 0
        assert not change(engine, chain_of(a, {**b, "codec": "zstd"})).why
        until_open(engine, "redis")
        assert served(engine, PROMPT)["redis"] > 0
        assert not change(engine, chain_of(a)).why
        assert served(engine, PROMPT).keys() <= {"cpu"}


def test_what_is_refused_touches_nothing(tmp_path: Path) -> None:
    a, b = both(tmp_path)
    with running(chain_of(a, b)) as engine:
        assert "salt" in ask_for(engine, chain_of(b, a, salt="other")).why
        assert "host memory" in ask_for(engine, chain_of(b)).why
        assert "version 1" in ask_for(engine, chain_of(b, a), if_version=2).why
        assert not ask_for(engine, chain_of(a, b)).why, "there is nothing to do"
        first = ask_for(engine, chain_of(b, a), if_version=1)
        assert "another change" in ask_for(engine, chain_of(b, a)).why
        finish(engine, first)
        assert changes_of(engine).version == 2 and not changes_of(engine)._leaving
        assert changes_of(engine)._pending is None


def test_tiers_whose_blocks_routers_know_do_not_leave(tmp_path: Path) -> None:
    a, b = both(tmp_path)
    with running(chain_of(a, b), kv_events=True) as engine:
        assert "KV events" in ask_for(engine, chain_of(a)).why
        assert not change(engine, chain_of(b, a)).why


def test_memory_of_a_change_that_was_refused_is_not_the_next_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(changes, "PREPARE_SECONDS", 0.2)
    hangs, goes_on = threading.Event(), threading.Event()
    check = HostSlots._check_room

    def hang_once(host: HostSlots, slots: int, pin: bool, *there: int) -> None:
        if there and not hangs.is_set():  # of a change, however little is provided yet
            hangs.set()
            goes_on.wait(60)
        check(host, slots, pin, *there)

    monkeypatch.setattr(HostSlots, "_check_room", hang_once)
    with running(chain_of(cpu(8)), ranks=1) as engine:
        served(engine, PROMPT)
        assert "have not opened it" in change(engine, chain_of(cpu(64))).why
        monkeypatch.setattr(changes, "PREPARE_SECONDS", 60.0)
        pending = ask_for(engine, chain_of(cpu(128)))
        engine.step()
        time.sleep(0.2)  # it asks for its memory, if it can
        goes_on.set()
        finish(engine, pending)
        assert not pending.why
        served(engine, PROMPT)  # behind it nothing is taken or given back any more
        host: Any = engine.workers[0].connector.children[0]._host  # type: ignore[attr-defined]
        host._mover.submit(int).result()
        assert len(host.memory.rows) == scheduler_of(engine).pool.num_slots == 128 + 64


def test_a_tier_that_opens_late_does_so_in_its_own_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A change that would have replaced it was refused, since its tier was late, too."""
    monkeypatch.setattr(changes, "PREPARE_SECONDS", 0.05)
    caplog.set_level(logging.INFO)
    late = Facts()
    with running(chain_of(cpu(8), disk(tmp_path / "disk")), late_facts=late) as engine:
        other = disk(tmp_path / "other", name="other")
        assert "have not opened it" in change(engine, chain_of(other, cpu(8))).why
        late.are_known = True
        until_open(engine, "disk")
        assert "tier 'disk' is open, load priority 2 of 2" in caplog.text


def test_what_a_rank_opened_too_late_is_not_the_next_changes(tmp_path: Path) -> None:
    a, b = both(tmp_path)
    with running(chain_of(a)) as engine:
        pending = ask_for(engine, chain_of(b, a, load_policy="first"))
        engine.step()
        changes_of(engine).heard(
            ChangeReport({0: {0: ""}}, {1: [WorkerHandshake(0, b"opened before", 1)]})
        )
        finish(engine, pending)
        served(engine, PROMPT)
        assert served(engine, PROMPT) == {"disk": WHOLE}


def test_an_engine_that_ends_while_ranks_prepare(tmp_path: Path) -> None:
    with running(chain_of(cpu(8))) as engine:
        pending = ask_for(engine, chain_of(cpu(8), disk(tmp_path)))
        engine.step()
        engine.close()
        assert pending.wait(0) and "ended" in pending.why
    assert ask_for(engine, chain_of(cpu(8), disk(tmp_path))).why == "the engine is ending"


@pytest.mark.parametrize("how", ["late", "the engine ends"])
def test_what_opens_behind_the_end_of_its_change_is_closed(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, goes_on = threading.Event(), threading.Event()
    open_ahead = OffloadingScheduler.open_ahead

    def slowly(tier: OffloadingScheduler, handshakes: Sequence[WorkerHandshake]) -> None:
        opening.set()
        assert goes_on.wait(60)
        open_ahead(tier, handshakes)

    monkeypatch.setattr(OffloadingScheduler, "open_ahead", slowly)
    with running(chain_of(cpu(8)), ranks=1) as engine:
        pending = ask_for(engine, chain_of(cpu(8), disk(tmp_path)))

        def begins() -> bool:
            engine.step()
            return opening.is_set()

        wait_until(begins)
        attaching, threads = changes_of(engine)._opening, changes_of(engine)._threads
        assert attaching is not None
        if how == "late":
            changes_of(engine)._until = 0.0
            finish(engine, pending)
            assert "the scheduler has not opened it" in pending.why
            threads.submit(int).result()  # behind what closes it
        else:
            engine.close()
            wait_until(lambda: sum(thread.is_alive() for thread in threads._threads) == 1)
        wait_until(lambda: not list((tmp_path / "owners").glob("*")))
        goes_on.set()
        attaching.result()
        wait_until(lambda: not list((tmp_path / "owners").glob("*")))


def test_a_change_that_no_step_begins_is_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = both(tmp_path)
    with running(chain_of(a, b)) as engine:
        woken: list[bool] = []
        monkeypatch.setattr(changes_of(engine), "_wake", lambda: woken.append(True))
        pending = ask_for(engine, chain_of(b, a))
        assert woken, "an engine that idles makes no step else"
        changes_of(engine)._unbegun.remove(pending)  # as a thread that is about to withdraw it
        engine.step()
        assert not pending.wait(0)
        changes_of(engine)._unbegun.append(pending)
        assert changes_of(engine).withdraw(pending) and "no step" in pending.why
        engine.step()
        assert changes_of(engine).version == 1
        pending = ask_for(engine, chain_of(a, {**b, "store_rate": "1GB/s"}))
        engine.step()
        assert not changes_of(engine).withdraw(pending), "a step has begun it"
        finish(engine, pending)
        assert not pending.why and changes_of(engine).version == 2


def test_ghosts_and_records_follow(tmp_path: Path) -> None:
    a, b = both(tmp_path / "disk")
    ghosts = {"ghosts": [{"tier": "cpu", "capacity": "2x"}]}
    record = {"record": {"path": str(tmp_path / "trace")}}
    with running(chain_of(a, b, **ghosts)) as engine:
        served(engine, PROMPT)
        assert not change(engine, chain_of(a, b, **ghosts, **record)).why
        live: Any = changes_of(engine)._rebuilder
        assert engine.connector is not None
        live._thread.submit(int).result()
        assert len(engine.connector._observers) == 2
        served(engine, PROMPT)
        board = StatusBoard(engine.connector)
        board.measured({"chain": engine.stats})
        assert not change(engine, chain_of(a, b, **record)).why
        assert not board.status("").ghosts, "there are none any more"
        assert not change(engine, chain_of(a, b)).why
        live._thread.submit(int).result()
        assert not engine.connector._observers
        assert list((tmp_path / "trace").glob("*"))


def test_a_recorder_that_opens_behind_the_end_of_its_engine_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its thread and its file stay for as long as the process lives."""
    goes_on, opening, opened = threading.Event(), threading.Event(), list[Recorder]()

    def slowly(recording: Recording) -> Recorder:
        opening.set()
        goes_on.wait(60)
        opened.append(Recorder(recording))
        return opened[-1]

    monkeypatch.setattr(observers, "Recorder", slowly)
    with running(chain_of(cpu(8))) as engine:
        record = {"record": {"path": str(tmp_path / "trace")}}
        assert not change(engine, chain_of(cpu(8), **record)).why
        assert opening.wait(60)
        live: Any = changes_of(engine)._rebuilder
        engine.close()
        goes_on.set()
        for thread in live._thread._threads:
            thread.join()
        (recorder,) = opened
        wait_until(lambda: not recorder._thread.is_alive())
        assert not handles_of(tmp_path / "trace", "*")


def test_a_recorder_opens_though_another_change_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, opened = threading.Event(), threading.Event()
    with running(chain_of(cpu(8))) as engine:
        live: Any = changes_of(engine)._rebuilder
        opens = live._opens["record"]

        def slowly(*args: Any) -> Any:
            opened.set()
            goes_on.wait(60)
            return opens(*args)

        live._opens = {**live._opens, "record": slowly}
        kept = {"record": {"path": str(tmp_path / "kept")}}
        first = {"record": {"path": str(tmp_path / "first")}}
        assert not change(engine, chain_of(cpu(8), **first)).why
        assert opened.wait(60)
        assert not change(engine, chain_of(cpu(8), **kept)).why
        assert not change(engine, chain_of(cpu(8, store_threshold=2), **kept)).why
        goes_on.set()
        live._thread.submit(int).result()
        assert engine.connector is not None
        (recorder,) = engine.connector._observers
        assert live._opened["record"] == (recorder,)
        served(engine, PROMPT)
    assert list((tmp_path / "kept").glob("*.jsonl*"))
    assert not list((tmp_path / "first").glob("*.jsonl*"))


def chains(path: Path) -> list[ChainSpec]:
    """Chains that lead to each other: by order, sizes and settings, with and without a disk."""
    a, b = cpu(12), disk(path, "160KiB")
    return [
        chain_of(a, b),
        chain_of(b, a, load_policy="first"),
        chain_of(a),
        chain_of(a, {**b, "durability": "batch"}, promote=False),
        chain_of({**a, "store_threshold": 2}, b, load_policy="longest", store="prompt"),
        chain_of(cpu(24), {**b, "capacity": "320KiB"}),
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_token_differs_under_changes(tmp_path: Path, ranks: int) -> None:
    """Little paged KV, so that requests are preempted, some aborted, resets; chains at random."""
    rng = random.Random(ranks)
    some = chains(tmp_path)
    requests = []
    applied = 0
    with running(some[0], ranks, num_blocks=24) as engine:
        pending = None
        for seed in range(3):
            for prompt, max_tokens in workload(seed):
                requests.append((engine.add(prompt, max_tokens), prompt))
                for _ in range(rng.randrange(4)):
                    engine.step()
                if pending is not None and rng.random() < 0.2:
                    finish(engine, pending)
                if pending is None or pending.wait(0):
                    applied += pending is not None and not pending.why
                    pending = ask_for(engine, rng.choice(some))
                if rng.random() < 0.05:
                    engine.scheduler.abort(rng.choice(requests)[0].request_id)
                if rng.random() < 0.01:
                    engine.reset_cache()
        engine.run()
        assert pending is not None
        finish(engine, pending)
        for request, prompt in requests:
            expected = answer(MODEL, prompt, request.max_tokens, ranks)
            assert request.output == expected[: len(request.output)], request.request_id
        assert applied > 8 and engine.scheduler.preemptions > 0
        assert tiers_of(engine) and scheduler_of(engine).jobs_in_flight == 0
