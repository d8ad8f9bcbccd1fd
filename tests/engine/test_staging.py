"""A tier that is offered more than there is room for: what it gets in the end, and what is said."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from spec.chain import ChainSpec
from spec.load import load_chain
from spec.offloading import STAGING
from tests.support.clock import wait_for
from tests.support.replay import ReplayEngine, ReplayModel
from tests.support.replay_chains import DENSE, MODEL, SLOT, measured, scheduler_of
from tests.support.slow_store import LONG, SlowSpec, TroubledStore, ask
from tiers.connector.scheduler.admission import QUIET_SECONDS, WINDOW_SECONDS
from tiers.store import Block

MakeEngine = Callable[..., ReplayEngine]
STEP = 8192
BLOCKS = 512


def chain(staging: int | None = 16 * SLOT, **more: Any) -> ChainSpec:
    tier = SlowSpec.model_validate({"type": "slow", **more})
    return ChainSpec(version=1, load_when="always", tiers=(tier,), staging=staging)


@pytest.mark.parametrize(
    ("ranks", "width", "part"), [pytest.param(1, 3072, 1, marks=pytest.mark.faults), (8, 384, 8)]
)
def test_a_disk_alone_stores_all_of_a_large_step(
    engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    width: int,
    part: int,
) -> None:
    """`part`: of its tokens, and of the memory that a chain has by default."""
    monkeypatch.setattr("tiers.contract.pool_size.STAGING", STAGING // part)
    blocks = BLOCKS // part
    disk = {"type": "disk", "path": str(tmp_path), "capacity": "1GiB", "io": "buffered"}
    made = engine(
        load_chain({"version": 1, "tiers": [disk]}),
        model=ReplayModel(layers=2, block_tokens=16, width=width),
        num_blocks=blocks + 2,
        batch_tokens=STEP // part,
        world_size=ranks,
    )
    made.generate(range(STEP // part), 1)
    made.settle()
    assert measured(made, "stored_blocks", "disk") == blocks * ranks
    assert not any("dropped" in name for name in made.stats["disk"])


def step_as_stores_end(made: ReplayEngine, goes_on: Callable[[], bool]) -> None:
    """An engine that steps on would soon be over."""
    half: Any = made.workers[0]
    in_flight = half.connector.children[0]._stores
    while goes_on():
        wait_for(lambda: all(one.future.done() for one in in_flight.values()))
        made.step()


def test_what_found_no_room_is_offered_again_while_its_request_runs(
    engine: MakeEngine, store: TroubledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few blocks in each step, until all are stored."""
    monkeypatch.setattr("tiers.connector.scheduler.tier_stores.RETRIES", 8)
    made = engine(chain(), num_blocks=120, batch_tokens=500, prefix_caching=False)
    request = made.add(LONG, 30)
    store.pace.hang("put")
    scheduler = scheduler_of(made)
    while not scheduler._stores.slots_pinned:  # the lookup is answered in the background
        made.step()
    assert scheduler._stores.slots_pinned == 16
    pool, busy = scheduler._tier.open.pool, [True] * 3
    claim = pool.claim
    monkeypatch.setattr(pool, "claim", lambda key: None if busy and busy.pop() else claim(key))
    store.pace.resume()
    step_as_stores_end(made, lambda: len(request.output) < 29)
    made.run()
    made.settle()
    assert set(request.block_hashes[:100]) <= {
        key[16:][: len(request.block_hashes[0])] for key in store.blocks
    }
    assert not busy, "others had the slots for a while"
    assert not measured(made, "store_dropped_no_slot") and not measured(
        made, "store_dropped_inflight"
    )
    assert max(scheduler._tier.admission.acceptance._lost.values()) <= 0, "none is lost"


def test_what_never_finds_room_is_counted_when_its_request_ends(
    engine: MakeEngine, store: TroubledStore
) -> None:
    made = engine(chain(), num_blocks=120, batch_tokens=500, prefix_caching=False)
    store.pace.hang("put")
    ask(made)
    assert measured(made, "store_dropped_inflight") == 101 - 16
    assert measured(made, "store_taken") == 16
    store.pace.resume()


def test_what_a_window_left_before_it_found_room_is_counted(
    engine: MakeEngine, store: TroubledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has given it to others by then: it can't be stored later."""
    used: list[int] = []
    made = engine(chain(), model=DENSE, num_blocks=400, batch_tokens=500, prefix_caching=False)
    request, scheduler = made.add(LONG, 30), scheduler_of(made)
    store.pace.hang("put")
    while not scheduler._stores.slots_pinned:
        made.step()
    made.step()
    monkeypatch.setattr(scheduler.manager, "touch_prefix", lambda keys: used.append(len(keys)))
    store.pace.resume()
    step_as_stores_end(made, lambda: len(request.output) < 29)
    made.run()
    made.settle()
    dropped = measured(made, "store_dropped_inflight")
    offered = 107 * len(scheduler._requests.groups)
    assert dropped and measured(made, "store_taken") + dropped == offered == used[-1]


def test_offering_again_costs_a_step_the_same_however_much_waits(
    engine: MakeEngine, store: TroubledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing while the tier lags behind, and where it does not, so many blocks of all requests."""
    made = engine(chain(), num_blocks=200, batch_tokens=1000, prefix_caching=False)
    scheduler = scheduler_of(made)
    store.pace.hang("put")
    requests = [made.add([n, *LONG[:150]], 30) for n in range(4)]
    # The lookups are answered in the background.
    while not all(request.num_computed_tokens for request in requests):
        made.step()
    made.step()
    asked: list[int] = []
    missing: Any = scheduler.manager.touch_and_list_missing

    def counting(keys: list[bytes]) -> Any:
        asked.append(len(keys))
        return missing(keys)

    monkeypatch.setattr(scheduler.manager, "touch_and_list_missing", counting)
    for _ in range(2):
        made.step()
    assert sum(asked) <= 2 * 4, "it lags behind, and yet it is offered old blocks"
    monkeypatch.setattr("tiers.connector.scheduler.tier_stores.RETRIES", 5)
    asked.clear()
    each: list[int] = []

    def goes_on() -> bool:
        each.append(sum(asked))
        asked.clear()
        return any(len(request.output) < 29 for request in requests)

    store.pace.resume()
    step_as_stores_end(made, goes_on)
    assert 5 <= max(each) <= 5 + 4
    made.run()


def test_a_request_that_was_preempted_offers_again_what_it_has_again(
    engine: MakeEngine, store: TroubledStore
) -> None:
    """Blocks that it lost are the other's by then: only right bytes may come back."""
    made = engine(chain(), num_blocks=60, batch_tokens=60, prefix_caching=False)
    store.pace.hang("put")
    both = [made.add([n, *LONG[:110]], 40) for n in range(2)]
    while not all(request.num_computed_tokens for request in both):
        time.sleep(0.01)  # else one is over before the other is looked up
        made.step()
    for _ in range(8):
        made.step()
    store.pace.resume()
    step_as_stores_end(made, lambda: made.scheduler.busy)
    made.settle()
    assert made.scheduler.preemptions > 0
    stored = len(store.blocks)
    for request in both:
        ask(made, request.prompt)
    assert measured(made, "loaded_tokens") > 0 and stored > 16


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "took" in record.getMessage()]


@pytest.mark.fault
@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({}, "raise staging"),
        ({"max_inflight": 8 * MODEL.payload_bytes}, "raise its max_inflight, now 4KiB"),
        ({"store_rate": "1MB/s"}, "stores in 10 s) or its store_rate, now 1MB/s"),
        ({"write_budget": "10kB/day"}, "raise its write_budget, now 10kB/day"),
    ],
)
def test_a_tier_that_takes_under_half_says_so_once_with_the_remedy(
    engine: MakeEngine,
    store: TroubledStore,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    remedy: str,
) -> None:
    clock = [0.0]
    made = engine(
        chain(**settings),
        num_blocks=120,
        batch_tokens=500,
        prefix_caching=False,
        now=lambda: clock[0],
    )
    store.pace.hang("put")
    with caplog.at_level(logging.WARNING):
        ask(made)
        assert not lines(caplog), "a minute is not over"
        for n in range(3):
            clock[0] += WINDOW_SECONDS
            ask(made, [n, *LONG])
        (line,) = lines(caplog)
        assert "tier 'slow (package tests)' took" in line
        assert "of the 101 blocks" in line and remedy in line
        clock[0] += QUIET_SECONDS
        ask(made, [5, *LONG])
        assert len(lines(caplog)) == 2
    store.pace.resume()


def test_a_store_that_refuses_most_blocks_is_told_of(
    engine: MakeEngine,
    store: TroubledStore,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store, "put", lambda blocks: [False] * len(blocks))
    clock = [0.0]
    made = engine(chain(200 * SLOT), num_blocks=120, prefix_caching=False, now=lambda: clock[0])
    with caplog.at_level(logging.WARNING):
        for n in range(3):
            ask(made, [n, *LONG])
            made.settle()
            clock[0] += WINDOW_SECONDS
    (line,) = lines(caplog)
    assert "no error of it, it is full" in line and "capacity" in line and "maxmemory" in line


def test_a_tier_that_takes_all_and_one_that_is_chosen_for_says_nothing(
    engine: MakeEngine, store: TroubledStore, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [0.0]
    made = engine(
        chain(300 * SLOT, store_threshold=2),
        num_blocks=120,
        prefix_caching=False,
        now=lambda: clock[0],
    )
    with caplog.at_level(logging.WARNING):
        for n in range(4):
            ask(made, [n, *LONG])
            made.settle()
            clock[0] += WINDOW_SECONDS
    assert not lines(caplog)


def test_a_slow_tier_s_queue_is_as_long_as_it_stores_in_ten_seconds(
    engine: MakeEngine, store: TroubledStore
) -> None:
    clock = [0.0]
    made = engine(chain(400 * SLOT), num_blocks=120, prefix_caching=False, now=lambda: clock[0])
    put = store.put

    def slow(blocks: Sequence[Block]) -> list[bool]:
        clock[0] += len(blocks) / 2
        return put(blocks)

    store.put = slow  # type: ignore[method-assign]
    half: Any = made.workers[0]
    half.connector.children[0]._host.now = lambda: clock[0]
    store.pace.hang("put")
    ask(made)
    store.pace.resume()
    made.settle()
    assert len(store.blocks) == 101, "nothing was measured before: it is no one's fault yet"
    store.pace.hang("put")
    for n in range(5):
        ask(made, [n, *LONG])
    assert scheduler_of(made)._stores.slots_pinned == 20, "two blocks a second"
    assert measured(made, "store_dropped_inflight") > 300
    store.pace.resume()
    made.settle()
    assert len(store.blocks) == 101 + 20
