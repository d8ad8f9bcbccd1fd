"""After a start: what was used last of the disk is in host memory before it is asked for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.changing import change, running, served
from tests.support.clock import Clock
from tests.support.lacking import refuse_threads
from tests.support.replay import ReplayEngine, answer
from tests.support.replay_chains import (
    MODEL,
    chain_of,
    cpu,
    damage_disk,
    disk,
    drive,
    encryption,
    measured,
    scheduler_of,
)
from tests.support.topologies import wait_until
from tiers.connector.scheduler import warming
from tiers.disk.disk_store import DiskStore
from tiers.disk.slab import slot_bytes

MakeEngine = Callable[..., ReplayEngine]
PROMPTS = [[number, *range(40)] for number in range(10)]
"""Of ten full blocks each."""
WHOLE = 40
"""Tokens of those."""


def stored(engine: MakeEngine, path: Path, **options: Any) -> None:
    """Have a disk tier that holds all prompts, of which the last one was used last."""
    made = engine(chain_of(cpu(), disk(path)), prefix_caching=False, **options)
    for prompt in PROMPTS:
        made.generate(prompt, 1)
        made.settle()
    made.close()


def warmed(engine: MakeEngine, path: Path, blocks: int | None = None, **options: Any) -> Any:
    """An engine on that disk which has been warmed, with this many blocks at most."""
    limit = (
        {} if blocks is None else {"bytes": f"{blocks * ranks_of(options) * MODEL.payload_bytes}B"}
    )
    host = cpu(options.pop("slots", 400), eviction=options.pop("eviction", "lru"))
    made = engine(chain_of(host, disk(path), warm=limit), prefix_caching=False, **options)
    made.run()
    return made


def ranks_of(options: dict[str, Any]) -> int:
    return int(options.get("world_size", 1))


def ask(made: ReplayEngine, prompt: list[int], ranks: int = 1) -> dict[str, float]:
    """How many tokens of a prompt each tier loads; the answer must be right."""
    before = {tier: measured(made, "loaded_tokens", tier) for tier in ("cpu", "disk")}
    assert made.generate(prompt, 4).output == answer(MODEL, prompt, 4, ranks)
    made.settle()
    return {t: measured(made, "loaded_tokens", t) - tokens for t, tokens in before.items()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_whole_prefixes_come_those_that_were_used_last_first(
    engine: MakeEngine, tmp_path: Path, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    stored(engine, tmp_path, world_size=ranks)
    caplog.set_level(logging.INFO)
    made = warmed(engine, tmp_path, 25, world_size=ranks, slots=400 * ranks)
    assert measured(made, "warmed_blocks", "disk") == 25
    assert scheduler_of(made).manager.slots_kept() == 25
    assert "as much as may be is loaded" in caplog.text
    served = [ask(made, prompt, ranks) for prompt in PROMPTS[:-4:-1]]
    assert served == [
        {"cpu": WHOLE, "disk": 0},
        {"cpu": WHOLE, "disk": 0},
        {"cpu": WHOLE / 2, "disk": WHOLE / 2},
    ]
    assert measured(made, "loaded_blocks", "cpu") == 25 * ranks, "nothing else was loaded"


def test_the_order_of_use_is_what_it_was(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warming, "JOB_BYTES", 5 * MODEL.payload_bytes)
    stored(engine, tmp_path)
    warmed(engine, tmp_path, 25).close()
    made = warmed(engine, tmp_path, 10)
    assert ask(made, PROMPTS[-1]) == {"cpu": WHOLE, "disk": 0}
    assert ask(made, PROMPTS[-2]) == {"cpu": 0, "disk": WHOLE}


@pytest.mark.parametrize("eviction", ["lru", "arc"])
def test_the_coldest_of_what_was_loaded_is_evicted_first(
    engine: MakeEngine, tmp_path: Path, eviction: str
) -> None:
    stored(engine, tmp_path)
    made = warmed(engine, tmp_path, slots=30, eviction=eviction)
    assert scheduler_of(made).manager.slots_kept() == 30, "as many as it has room for"
    assert measured(made, "evictions", "cpu") == 0
    ask(made, [5] * 41)  # ten blocks, and one that its answer completes
    assert ask(made, PROMPTS[-1]) == {"cpu": WHOLE, "disk": 0}
    assert ask(made, PROMPTS[-3])["disk"] == WHOLE


def test_what_another_model_uses_of_the_folder_since_is_not_evicted_for_it(
    engine: MakeEngine, tmp_path: Path
) -> None:
    """The folder has room for what both have stored; the other's was used last."""
    room = f"{200 * slot_bytes(MODEL.payload_bytes)}B"
    for salt in ("a", "b"):
        made = engine(chain_of(cpu(), disk(tmp_path, room), salt=salt), prefix_caching=False)
        for prompt in PROMPTS:
            made.generate(prompt, 1)
            made.settle()
        made.close()
    warm = chain_of(cpu(400), disk(tmp_path, room), salt="a", warm={})
    made = engine(warm, prefix_caching=False)
    made.run()
    assert measured(made, "warmed_blocks", "disk") > 90
    made.close()
    made = engine(chain_of(disk(tmp_path, room), salt="b"), prefix_caching=False)
    for number in range(9):
        made.generate([7, number, *range(40)], 1)
        made.settle()
    assert [ask(made, prompt)["disk"] for prompt in PROMPTS] == [WHOLE] * 10


def test_a_damaged_block_is_left_out(engine: MakeEngine, tmp_path: Path) -> None:
    stored(engine, tmp_path)
    damage_disk(tmp_path)
    made = warmed(engine, tmp_path)
    assert measured(made, "warmed_blocks", "disk") < 100
    assert measured(made, "damaged_blocks", "disk") > 0
    for prompt in PROMPTS:
        ask(made, prompt)


def test_a_worker_that_gets_no_thread_any_more_loads_them(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(engine, tmp_path)
    made = engine(chain_of(cpu(400), disk(tmp_path), warm={}), prefix_caching=False)
    # But the scheduler's, which may be in another process.
    refuse_threads(monkeypatch, lambda some: some.name != "kvtiers-warm")
    made.run()
    assert measured(made, "warmed_blocks", "disk") == 100
    assert ask(made, PROMPTS[-1]) == {"cpu": WHOLE, "disk": 0}


def test_a_reset_meanwhile_leaves_nothing(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warming, "JOB_BYTES", 20 * MODEL.payload_bytes)
    stored(engine, tmp_path)
    slow = disk(tmp_path, load_rate=f"{40 * MODEL.payload_bytes}B/s")
    made = engine(chain_of(cpu(400), slow, warm={}), prefix_caching=False)
    for _ in range(1000):
        if measured(made, "warmed_blocks", "disk") and scheduler_of(made, 1).jobs_in_flight:
            break
        made.step()
    held = scheduler_of(made).manager.slots_kept()
    assert 0 < held < 100 and scheduler_of(made).pool.in_use > held, "one job is in flight"
    made.reset_cache()
    made.run()
    assert scheduler_of(made).manager.slots_kept() == scheduler_of(made).pool.in_use == 0
    assert ask(made, PROMPTS[-1]) == {"cpu": 0, "disk": 0}


def test_requests_that_come_meanwhile_go_first_and_are_right(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warming, "JOB_BYTES", 1)  # a block with each step
    made = engine(chain_of(cpu(60), disk(tmp_path)), num_blocks=60)
    drive(made, 3)
    made.settle()
    made.close()
    made = engine(chain_of(cpu(400), disk(tmp_path), warm={}), num_blocks=60)
    drive(made, 3)
    assert measured(made, "warmed_blocks", "disk") > 0
    assert measured(made, "store_failures", "cpu") == measured(made, "load_failures", "cpu") == 0


def test_it_stops_when_host_memory_is_needed(
    engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(warming, "JOB_BYTES", 10 * MODEL.payload_bytes)
    stored(engine, tmp_path)
    caplog.set_level(logging.INFO)
    slow = disk(tmp_path, load_rate=f"{20 * MODEL.payload_bytes}B/s")
    made = engine(chain_of(cpu(40), slow, warm={}), prefix_caching=False)
    while not measured(made, "warmed_blocks", "disk"):
        made.step()  # else blocks of the others may be named, as used last
    others = [[7, number, *range(40)] for number in range(3)]
    for prompt in others:
        made.generate(prompt, 1)
    made.run()
    assert "host memory is needed" in caplog.text
    assert 0 < measured(made, "warmed_blocks", "disk") < 40
    for prompt in others:
        assert ask(made, prompt) == {"cpu": WHOLE, "disk": 0}


@pytest.mark.parametrize(
    ("lacks", "seconds"), [("has_opened", warming.OPENING_SECONDS), ("reads", 10.0)]
)
def test_it_begins_when_its_tiers_are_there_however_late(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str, seconds: float
) -> None:
    """An engine without requests makes steps for that only so long."""
    stored(engine, tmp_path)
    chain = chain_of(cpu(400), disk(tmp_path), warm={"seconds": "10s"})
    made = engine(chain, prefix_caching=False)
    source, clock = scheduler_of(made, 1), Clock(1000.0)
    waiting = source._warming
    assert waiting is not None
    monkeypatch.setattr(waiting, "_now", clock)
    with monkeypatch.context() as closed:
        closed.setattr(type(source._tier), lacks, False)
        for passed in (0.0, seconds - 1.0):
            clock.now += passed
            made.step()
            assert waiting.waits
        clock.now += 2.0
        made.step()
        assert not waiting.waits
    made.generate([1, 2, 3], 1)
    made.run()
    assert measured(made, "warmed_blocks", "disk") == 100


@pytest.mark.parametrize("paused", ["reads", "writes"])
def test_a_tier_that_is_paused_is_not_warmed_from_and_none_is_warmed(
    engine: MakeEngine, tmp_path: Path, paused: str, caplog: pytest.LogCaptureFixture
) -> None:
    stored(engine, tmp_path / "disk")
    caplog.set_level(logging.INFO)
    (tmp_path / "other").mkdir()
    host, first = cpu(400), disk(tmp_path / "disk")
    (first if paused == "reads" else host)["paused"] = paused
    others = [disk(tmp_path / "other", name="other")]
    made = engine(chain_of(host, first, *others, warm={}), prefix_caching=False)
    made.run()
    assert scheduler_of(made).manager.slots_kept() == 0
    assert "a tier is paused" in caplog.text
    assert "of tier 'other'" in caplog.text, "the next store is asked"


@pytest.mark.fault
def test_an_engine_that_idles_makes_no_step_for_a_store_that_hangs(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(engine, tmp_path)
    goes_on = threading.Event()
    get = DiskStore.get

    def hung(store: DiskStore, blocks: Any) -> list[bool]:
        goes_on.wait(60)
        return get(store, blocks)

    monkeypatch.setattr(DiskStore, "get", hung)
    made = engine(chain_of(cpu(400), disk(tmp_path), warm={"seconds": "1s"}), prefix_caching=False)

    def is_idle() -> bool:
        made.step()
        return not made.scheduler.busy

    try:
        wait_until(is_idle)
        assert scheduler_of(made, 1).jobs_in_flight, "the store has not answered"
    finally:
        goes_on.set()
    wait_until(lambda: not made.step() and not scheduler_of(made, 1).jobs_in_flight)
    held = scheduler_of(made).manager.slots_kept()
    assert held == scheduler_of(made).pool.in_use > 0
    assert ask(made, PROMPTS[-1])["cpu"] == WHOLE


@pytest.mark.parametrize("above", ["refused", "down"])
def test_a_store_that_can_not_be_used_leaves_it_to_the_next(
    engine: MakeEngine, tmp_path: Path, above: str
) -> None:
    """One whose path is a link, or a server that answers nobody."""
    stored(engine, tmp_path / "disk")
    (tmp_path / "link").symlink_to(tmp_path)
    first = {"type": "redis", "url": "redis://127.0.0.1:1/0"}
    first = first if above == "down" else disk(tmp_path / "link", name="link")
    tiers = cpu(400), first, disk(tmp_path / "disk")
    made = engine(chain_of(*tiers, warm={"seconds": "1s"}), prefix_caching=False)
    made.run()
    assert measured(made, "warmed_blocks", "disk") == 100


def test_an_encrypted_store_has_no_keys_to_name(
    engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tiers = cpu(400), disk(tmp_path / "disk", **encryption(tmp_path))
    made = engine(chain_of(*tiers, warm={}), prefix_caching=False)
    made.run()
    assert "can't tell what was used last" in caplog.text


@pytest.mark.parametrize(
    ("tiers", "more", "why"),
    [
        ([cpu()], {}, "needs a cpu tier, and a store"),
        ([cpu(), disk(Path("/x"))], {"tenants": {"a": {"tiers": ["disk"]}}}, "out of 'cpu'"),
    ],
)
def test_a_chain_with_nothing_to_warm_is_refused(
    tiers: list[dict[str, Any]], more: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        chain_of(*tiers, warm={}, **more)


def test_a_store_that_leaves_meanwhile_ends_it(
    tmp_path: Path, engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warming, "JOB_BYTES", 20 * MODEL.payload_bytes)
    stored(engine, tmp_path)
    host, store = cpu(400), disk(tmp_path, load_rate=f"{40 * MODEL.payload_bytes}B/s")
    with running(chain_of(host, store, warm={}), ranks=1, prefix_caching=False) as made:
        for _ in range(1000):
            if measured(made, "warmed_blocks", "disk") and scheduler_of(made, 1).jobs_in_flight:
                break
            made.step()
        assert not change(made, chain_of(host)).why
        made.run()
        assert 0 < scheduler_of(made).manager.slots_kept() < 100
        assert served(made, PROMPTS[-1]) == {"cpu": WHOLE}


@pytest.mark.parametrize("paused", ["reads", "writes"])
def test_a_pause_meanwhile_ends_it(
    tmp_path: Path, engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, paused: str
) -> None:
    monkeypatch.setattr(warming, "JOB_BYTES", 20 * MODEL.payload_bytes)
    stored(engine, tmp_path)
    host, store = cpu(400), disk(tmp_path, load_rate=f"{40 * MODEL.payload_bytes}B/s")
    with running(chain_of(host, store, warm={}), ranks=1, prefix_caching=False) as made:
        while not measured(made, "warmed_blocks", "disk"):
            made.step()
        (store if paused == "reads" else host)["paused"] = paused
        assert not change(made, chain_of(host, store, warm={})).why
        made.run()
        assert 0 < measured(made, "warmed_blocks", "disk") < 100


@pytest.mark.parametrize("slots", [25, 800])
def test_a_cpu_tier_that_is_resized_meanwhile(
    tmp_path: Path, engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    monkeypatch.setattr(warming, "JOB_BYTES", 20 * MODEL.payload_bytes)
    stored(engine, tmp_path)
    store = disk(tmp_path, load_rate=f"{40 * MODEL.payload_bytes}B/s")
    with running(chain_of(cpu(400), store, warm={}), ranks=1, prefix_caching=False) as made:
        for _ in range(1000):
            if measured(made, "warmed_blocks", "disk") and scheduler_of(made, 1).jobs_in_flight:
                break
            made.step()
        assert not change(made, chain_of(cpu(slots), store, warm={})).why
        made.run()
        assert 20 <= scheduler_of(made).manager.slots_kept() <= slots
        assert ask(made, PROMPTS[-1])["cpu"] + ask(made, PROMPTS[0])["disk"] > 0


def test_the_first_store_that_knows_what_was_used_last_is_asked(
    engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Behind one that does not, as a server or a shared directory, and one that hides its names."""
    (shared := tmp_path / "shared").mkdir(0o700)
    stored(engine, tmp_path / "disk")
    caplog.set_level(logging.INFO)
    above = {"type": "shared", "path": str(shared)}
    hidden = disk(tmp_path / "hidden", **encryption(tmp_path), name="hidden")
    below = disk(tmp_path / "below", name="below")
    made = engine(
        chain_of(cpu(400), above, hidden, disk(tmp_path / "disk"), below, warm={}),
        prefix_caching=False,
    )
    made.run()
    assert measured(made, "warmed_blocks", "disk") == 100
    assert ask(made, PROMPTS[0]) == {"cpu": WHOLE, "disk": 0}
    assert caplog.text.count("can't tell what was used last") == 2
    assert caplog.text.count("all is loaded") == 1
