"""Admission: what a tier's rules keep out of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest

from bench.scheduled import Step
from spec.chain import TenantSpec
from tests.support.clock import Clock
from tests.support.fake_requests import FakeNewRequest, FakeRequest, FakeStep
from tiers.connector.policy.request_table import RequestTable
from tiers.connector.scheduler.admission import (
    WINDOW_SECONDS,
    Admission,
    Tenants,
    ThresholdAdmission,
)
from tiers.connector.scheduler.jobs import Jobs, PendingStore
from tiers.connector.scheduler.kv_events import KVEvents, Place
from tiers.connector.scheduler.open_tier import OpenTier
from tiers.connector.scheduler.tier import Tier
from tiers.connector.scheduler.tier_hints import TierHints
from tiers.connector.scheduler.tier_manager import TierManager
from tiers.connector.scheduler.tier_stores import Offers, TierStores
from tiers.contract.engine_info import EngineInfo, KVGroup
from tiers.contract.messages import JobResult
from tiers.disk.spec import DiskSpec
from tiers.host.slots import SlotPool
from tiers.lab.replay.requests import CachedRequests
from tiers.wrappers.guard import HEALTHY


@pytest.fixture
def clock() -> Clock:
    return Clock()


def rules(clock: Clock, **settings: Any) -> Admission:
    disk = {"capacity": "1GiB", "path": "/nowhere", **settings}
    return Admission(DiskSpec.model_validate(disk), clock)


def test_without_rules_all_is_stored(clock: Clock) -> None:
    assert rules(clock).refuses(b"key", 1 << 40) is None


def test_a_block_is_stored_when_enough_requests_had_it(clock: Clock) -> None:
    admission = rules(clock, store_threshold=3)
    assert [admission.refuses(b"key", 1) for _ in range(3)] == ["store_deferred"] * 2 + [None]
    assert admission.refuses(b"key", 1) is None, "it could not be stored then"
    admission.stores(b"key", 1)
    assert admission.refuses(b"key", 1) == "store_deferred", "evicted, it begins anew"


def test_blocks_that_find_room_late_hide_no_loss(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    told = rules(clock).acceptance
    told.offered(30, ["store_dropped_no_slot"] * 10)
    clock.now += WINDOW_SECONDS
    told.look()
    told.found_room(["store_dropped_no_slot"] * 10)
    told.offered(4, ["store_dropped_inflight"] * 20)
    assert not caplog.records
    clock.now += WINDOW_SECONDS
    told.look()
    assert "took 4 of the 24 blocks" in caplog.text


def test_counts_are_kept_for_so_many_blocks(clock: Clock) -> None:
    admission = rules(clock, store_threshold=2)
    admission.refuses(b"old", 1)
    for number in range(ThresholdAdmission.COUNTED):
        admission.refuses(number.to_bytes(8, "big"), 1)
    assert admission.refuses(b"old", 1) == "store_deferred"
    assert admission.refuses((ThresholdAdmission.COUNTED - 1).to_bytes(8, "big"), 1) is None


def test_a_write_budget_holds_over_days_and_lets_an_hour_s_worth_pass_at_once(
    clock: Clock,
) -> None:
    admission = rules(clock, write_budget="2400MB/day")
    written = 0
    for _ in range(48 * 60):
        for _ in range(10):
            if admission.refuses(b"key", 1_000_000) is None:
                admission.stores(b"key", 1_000_000)
                written += 1
        if clock.now == 0:
            assert written == 10
        clock.now += 60
    assert 2 * 2400 <= written <= 2 * 2400 + 101
    assert admission.refuses(b"key", 10**9) == "store_dropped_budget"


class Empty(TierManager):
    def touch_and_list_missing(self, keys: Sequence[bytes]) -> list[bool]:
        return [True] * len(keys)


def stores_of(
    requests: RequestTable, clock: Clock, slots: int, *, opens: bool = True
) -> tuple[Tier, TierStores]:
    events = KVEvents(Place("tier", "STORAGE", True), requests)
    tier = Tier("tier", requests, rules(clock), Tenants("tier", {}), events)
    if opens:
        tier.opened(OpenTier(Empty(), SlotPool(slots), block_bytes=1))
    tier.update({0: HEALTHY})
    return tier, TierStores(tier, Jobs(1), TierHints(tier, clock), promote=False)


def test_nothing_is_stored_in_a_tier_that_is_down(clock: Clock) -> None:
    offers = Offers([7], [b"key"], [1])
    tier, stores = stores_of(RequestTable(EngineInfo({}, 4, 4, 9)), clock, slots=1)
    tier.update({1: HEALTHY._replace(writes=False)})
    assert stores.claim(offers, [True]) == ({}, {7: "store_dropped_down"})
    tier.update({1: HEALTHY})
    assert list(stores.claim(offers, [True])[0]) == [7]


def test_a_tier_takes_what_it_lacks_once_as_far_as_there_is_room(clock: Clock) -> None:
    tier, stores = stores_of(RequestTable(EngineInfo({}, 4, 4, 9)), clock, slots=16)
    held = tier.open.pool.claim(b"f")
    assert held is not None, "another tier has it in a slot"
    offers = Offers(range(3, 9), [b"a", b"b", b"c", b"d", b"e", b"f"], range(11, 17))

    def taken(*missed: bool) -> tuple[dict[int, int | None], dict[int, str]]:
        items, refused = stores.claim(offers, missed)
        return {number: item.source for number, item in items.items()}, refused

    assert taken(*[False] * 6) == ({}, {})
    assert taken(False, True, False, True, False, True) == ({4: 12, 6: 14, 8: None}, {})
    assert taken(True, True, False, True, False, True) == ({3: 11}, {}), "others are in flight"
    assert stores.slots_pinned == 4
    stores.slots_pinned = 7  # of 8
    late = "store_dropped_inflight"
    assert taken(False, True, True, True, True, True) == ({5: 13}, {7: late})
    small, stores = stores_of(RequestTable(EngineInfo({}, 4, 4, 9)), clock, slots=2)
    stores._most_inflight = lambda: 99  # type: ignore[method-assign]
    none = "store_dropped_no_slot"
    assert taken(*[True] * 6) == ({3: 11, 4: 12}, dict.fromkeys(range(5, 9), none))
    assert small.open.pool.in_use == 2


def test_behind_a_block_that_is_not_asked_for_often_enough_others_may_be(clock: Clock) -> None:
    tier, stores = stores_of(RequestTable(EngineInfo({}, 4, 4, 9)), clock, slots=16)
    tier.admission.use(rules(clock, store_threshold=2).acceptance.spec, False)
    tier.admission.refuses(b"b", 1)
    offers = Offers([0, 1, 2], [b"a", b"b", b"c"], [1, 2, 3])
    items, refused = stores.claim(offers, [True] * 3)
    assert ([*items], refused) == ([1], {0: "store_deferred", 2: "store_deferred"})
    stores._keys.clear()  # it was stored, and evicted
    assert [*stores.claim(offers, [True] * 3)[0]] == [0, 2], "of the other it is the first time"


def test_blocks_that_were_not_stored_are_not_counted_as_stored(clock: Clock) -> None:
    requests = RequestTable(EngineInfo({}, 4, 4, 9))
    tier, stores = stores_of(requests, clock, slots=64)
    new = [FakeNewRequest("a", 0, ([1, 2],)), FakeNewRequest("b", 0, ([3, 4],))]
    for row in new:
        name = row.req_id
        one: Any = FakeRequest(name, block_hashes=[name.encode() + b"1", name.encode() + b"2"])
        one.cache_salt = name
        requests.of(one)
    requests.tenants.names = {"a": "A", "b": "B"}
    (job,), _ = stores.orders(requests.begin_step(FakeStep({"a": 8, "b": 8}, *new)))
    ended = JobResult(1, failed={1}, seconds=3.0, already_stored={2}, bytes=20)
    store = stores._jobs.end(job.job_id, ended)
    assert isinstance(store, PendingStore)
    stores.ended(store)
    assert tier.admission.rate.blocks_in(3.0) == pytest.approx(3)
    assert tier.admission.acceptance._lost == {"store_failures": 1}
    measured = [*requests.tenants.take_measures().values()]
    assert [one["tenant_stored_bytes"] for one in measured] == [10, 10], "a block of each is new"
    assert not (stores.slots_pinned or stores._keys or stores._reading or tier.open.pool.in_use)


def test_what_the_engine_gives_away_before_there_is_room_holds_nothing_back(clock: Clock) -> None:
    groups = KVGroup(4), KVGroup(4, window=4)
    requests = RequestTable(EngineInfo({}, 4, 4, 9, groups=groups))
    _, stores = stores_of(requests, clock, slots=16)
    state = requests.of(FakeRequest("r", block_hashes=[b"a", b"b", b"c"]))
    stores.slots_pinned = 8
    full = requests.begin_step(FakeStep({"r": 8}, FakeNewRequest("r", 0, ([1, 2], [5, 6]))))
    assert stores.orders(full) == ([], []) and state.to_offer_again
    stores.slots_pinned = 0
    again = CachedRequests(["r"], set(), [([3], [7])], [8])
    (job,), _ = stores.orders(requests.begin_step(Step([], {"r": 4}, again)))
    assert [item.source for item in job.items] == [1, 2, 6, 3, 7]
    assert not state.to_offer_again


def test_what_had_no_room_is_offered_again_as_far_as_it_is_computed_again(clock: Clock) -> None:
    """After a preemption the request has other blocks, and fewer."""
    requests = RequestTable(EngineInfo({}, 4, 4, 9))
    _, stores = stores_of(requests, clock, slots=16)
    requests.of(FakeRequest("r", block_hashes=[b"a", b"b", b"c"]))
    stores.slots_pinned = 8
    full = requests.begin_step(FakeStep({"r": 8}, FakeNewRequest("r", 0, ([1, 2],))))
    assert stores.orders(full) == ([], [])
    stores.slots_pinned = 0
    for before, block in ((0, 7), (4, 8)):
        cached = CachedRequests(["r"], {"r"} if not before else set(), [([block],)], [before])
        (job,), _ = stores.orders(requests.begin_step(Step([], {"r": 4}, cached)))
        assert [item.source for item in job.items] == [block]


def test_a_tier_that_opens_is_offered_what_was_computed_before_and_one_that_fails_nothing(
    clock: Clock,
) -> None:
    requests = RequestTable(EngineInfo({}, 4, 4, 9))
    tier, stores = stores_of(requests, clock, slots=16, opens=False)
    state = requests.of(FakeRequest("r", block_hashes=[b"a", b"b"]))
    step = requests.begin_step(FakeStep({"r": 8}, FakeNewRequest("r", 0, ([1, 2],))))
    assert stores.orders(step) == ([], []) and state.to_offer_again
    tier.opened(OpenTier(Empty(), SlotPool(16), block_bytes=1))
    answer = CachedRequests(["r"], set(), [None], [8])
    (job,), _ = stores.orders(requests.begin_step(Step([], {"r": 1}, answer)))
    assert [item.source for item in job.items] == [1, 2] and not state.to_offer_again
    tier.failed("its worker is gone")
    state = requests.of(FakeRequest("s", block_hashes=[b"c", b"d"]))
    step = requests.begin_step(FakeStep({"s": 8}, FakeNewRequest("s", 0, ([3, 4],))))
    assert stores.orders(step) == ([], []) and not state.to_offer_again


@pytest.mark.parametrize("promote", [True, False])
def test_blocks_that_a_request_found_are_stored_where_tiers_promote(
    clock: Clock, promote: bool
) -> None:
    requests = RequestTable(EngineInfo({}, 4, 4, 9))
    _, stores = stores_of(requests, clock, slots=16)
    stores.promote = promote
    requests.of(FakeRequest("r", block_hashes=[b"a", b"b"]))
    step = requests.begin_step(FakeStep({"r": 4}, FakeNewRequest("r", 4, ([1, 2],))))
    (job,), _ = stores.orders(step)
    assert [item.source for item in job.items] == ([1, 2] if promote else [2])


def test_a_tier_may_have_on_its_way_what_it_stores_in_ten_seconds(clock: Clock) -> None:
    admission = rules(clock)
    begins = admission.most_inflight(1 << 20, 100_000)
    assert begins == 256, "256 MiB, until something is measured"
    assert admission.most_inflight(1 << 20, 100) == 50, "half of all slots at most"
    assert admission.most_inflight(1 << 30, 100_000) == 1
    for _ in range(100):
        admission.rate.ended(64, seconds=0.1)
    assert admission.most_inflight(1 << 20, 100_000) == 6400
    for _ in range(100):
        admission.rate.ended(1, seconds=1.0)
    assert admission.most_inflight(1 << 20, 100_000) < 20, "it has become slow"
    admission.rate.ended(0, seconds=1000.0)
    assert admission.most_inflight(1 << 20, 100_000) == 1, "it stores nothing at all"
    for _ in range(200):
        admission.rate.ended(64, seconds=0.1)
    assert 4000 < admission.most_inflight(1 << 20, 100_000) <= 6400, "and is well again"


def test_max_inflight_holds_whatever_is_measured(clock: Clock) -> None:
    admission = rules(clock, max_inflight="1GiB")
    assert admission.most_inflight(1 << 20, 100_000) == 1024
    admission.rate.ended(1, seconds=1.0)
    assert admission.most_inflight(1 << 20, 100_000) == 1024


def test_a_tier_begins_with_the_blocks_of_two_steps(clock: Clock) -> None:
    disk = DiskSpec.model_validate({"capacity": "1GiB", "path": "/nowhere"})
    admission = Admission(disk, clock, step_blocks=512)
    assert admission.most_inflight(5 << 20, 100_000) == 1024


def test_the_oldest_of_a_tenant_are_beyond_its_quota_and_found_at_once() -> None:
    tenants = Tenants("tier", {"small": TenantSpec(quota=3)})
    for key in (b"a", b"b", b"c", b"a", b"d", b"e"):
        tenants.keeps("small", key)
    assert tenants.beyond("small", 1) == [b"b", b"c"]
    # The first of a plain dict is found only behind all that were removed before it: 0.3 ms for
    # each block that comes, of a tenant with half a million.
    assert isinstance(tenants._kept["small"], OrderedDict)
    assert [*tenants._kept["small"]] == [b"a", b"d", b"e"]
