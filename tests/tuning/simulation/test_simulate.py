"""The simulation's decisions against curves that are exact, and traces whose answer is known."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest

from spec.chain import LOAD_POLICIES
from spec.errors import SpecError
from spec.load import load_chain
from spec.offloading import LOADS_AT_ONCE
from tests.lab.replay.worlds import chats
from tiers.traces.trace import TraceRequest
from tiers.tuning.machine import Machine, TierProfile
from tiers.tuning.report import Report
from tiers.tuning.simulation import workload as workload_module
from tiers.tuning.simulation.sim_chain import SimChain, SimTier
from tiers.tuning.simulation.simulate import _tiers, simulate
from tiers.tuning.simulation.workload import Workload

SIZE = 16
"""Tokens of a block; a block has as many bytes."""
FAST = 1e15


def lru_hits(requests: Sequence[TraceRequest], size: int) -> int:
    """Leading blocks that an LRU has, whose prompts are touched from tail to head."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        for block in request.blocks:
            if block not in held:
                break
            hits += 1
        for block in reversed(request.blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > size:
            held.popitem(last=False)
    return hits


def aged_hits(requests: Sequence[TraceRequest], size: int) -> int:
    """Leading blocks that a tier has which evicts what was stored first."""
    held: dict[int, None] = {}
    hits = 0
    for request in requests:
        found = [block in held for block in request.blocks]
        hits += [*found, False].index(False)
        held |= {block: None for block in request.blocks if block not in held}
        for block in [*held][: max(0, len(held) - size)]:
            del held[block]
    return hits


def machine(**more: Any) -> Machine:
    """Everything takes no time, but what is said; the engine has no cache of its own."""
    tiers = {name: TierProfile(load_bandwidth=FAST, store_bandwidth=FAST) for name in "abc"}
    base: dict[str, Any] = {"kv_bytes_per_token": 1, "engine_cache": 0, "prefill_rate": FAST}
    return Machine(**(base | {"tiers": tiers, "step_tokens": 1 << 40} | more))


def always(
    tiers: tuple[SimTier, ...], load_policy: str = "stitched", promote: bool = True
) -> SimChain:
    """A chain that loads whatever it has."""
    return SimChain(tiers, load_policy, promote, load_when="always")


def tier(name: str, blocks: int, **more: Any) -> SimTier:
    return SimTier(name, name, True, blocks * SIZE, **more)


def by_blocks(requests: Sequence[TraceRequest]) -> Workload:
    """With each block as a run of its own: slower, and the same but for what ends within runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workload_module, "bisect_right", lambda *_, lo, **__: lo + 1)
        return Workload.of(requests, SIZE)


def blocks_of(report: Report) -> list[int]:
    return [use.hit_tokens // SIZE for use in report.tiers]


@pytest.mark.parametrize(
    ("capacity", "single"), [(7, False), (30, True), (100, False), (100, True), (5000, True)]
)
def test_one_tier_is_exact_at_every_size(capacity: int, single: bool) -> None:
    requests = chats(1, 400, 1000.0)
    workload = by_blocks(requests) if single else Workload.of(requests, SIZE)
    report = simulate(workload, SIZE, always((tier("a", capacity),)), machine())
    assert blocks_of(report) == [lru_hits(requests, capacity)]
    assert report.computed_tokens == report.prompt_tokens - report.tier_hit_tokens


@pytest.mark.parametrize("capacity", [7, 30, 100, 400, 5000])
def test_an_object_tier_evicts_by_age(capacity: int) -> None:
    """What is in use, too, so that a prefix of all prompts goes once in each turn."""
    requests = chats(1, 400, 1000.0)
    bucket = SimTier("a", "object", False, capacity * SIZE)
    report = simulate(by_blocks(requests), SIZE, always((bucket,)), machine())
    assert blocks_of(report) == [aged_hits(requests, capacity)]


@pytest.mark.parametrize(
    ("above", "asked", "hits"),
    [
        ((), [(0, 1), (40, 1), (80, 1), (120, 1), (160, 1), (161, 1)], 3),
        ((tier("a", 1),), [(0, 1), (40, 1), (80, 1), (120, 1), (121, 2), (170, 1)], 1),
    ],
    ids=["loaded from it", "loaded from a tier above"],
)
def test_a_block_expires_a_ttl_after_it_was_stored_or_offered(
    above: tuple[SimTier, ...], asked: Sequence[tuple[int, int]], hits: int
) -> None:
    """A load does not renew it, nor the offer of what was just loaded, which the chain knows to be
    held; what another tier has loaded is offered, and so renewed. `asked`: minutes and blocks."""
    requests = [TraceRequest(60e3 * minute, SIZE + 1, 0, [block]) for minute, block in asked]
    chain = always((*above, SimTier("b", "b", False, 100 * SIZE, ttl=3600.0)))
    assert blocks_of(simulate(requests, SIZE, chain, machine()))[-1] == hits


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ({"eviction": "newest"}, "a: found eviction 'newest'; simulated are lru, arc"),
        ({"admission": "soon"}, "a: found admission 'soon'; simulated is threshold"),
    ],
)
def test_a_policy_that_is_not_simulated_is_refused_by_name(
    policy: dict[str, str], says: str
) -> None:
    with pytest.raises(SpecError, match=says):
        simulate([], 16, SimChain((tier("a", 9, **policy),)), machine())


@pytest.mark.parametrize("policy", ["longest", "stitched"])
def test_an_inclusive_chain_is_the_curve_at_each_size(policy: str) -> None:
    requests = chats(2, 400, 1000.0)
    chain = always((tier("a", 60), tier("b", 400)), load_policy=policy)
    upper, both = lru_hits(requests, 60), lru_hits(requests, 400)
    found = blocks_of(simulate(requests, SIZE, chain, machine(prefill_rate=1e6)))
    assert sum(found) == both
    if policy == "stitched":
        assert found == [upper, both - upper]


@pytest.mark.parametrize(
    ("policy", "promote"), zip(LOAD_POLICIES, (True, False, True), strict=True)
)
def test_runs_change_nothing_where_stores_have_room(policy: str, promote: bool) -> None:
    """Steps, loads and evictions begin and end within runs."""
    requests = chats(3, 150, 20.0)
    chain = always((tier("a", 90), tier("b", 300)), policy, promote)
    slow = {
        "a": TierProfile(load_bandwidth=4e3, store_bandwidth=4e3, load_latency=0.001),
        "b": TierProfile(load_bandwidth=3e3, store_bandwidth=2e3, store_latency=0.002),
    }
    steps = {"prefill_rate": 1e3, "step_tokens": 5 * SIZE + 3, "engine_cache": 50 * SIZE}
    on = machine(tiers=slow, gpus=2, decode_seconds_per_token=0.01, **steps)
    workloads = Workload.of(requests, SIZE), by_blocks(requests)
    by_run, by_block = (simulate(workload, SIZE, chain, on) for workload in workloads)
    assert by_run == by_block
    assert all(blocks_of(by_run)) or policy == "first"


def test_stretches_show_how_waiting_times_vary() -> None:
    later = [TraceRequest(n * 1e6, 10 + 10 * (n >= 44), 1, []) for n in range(80)]
    one = simulate(later, SIZE, always(()), machine(prefill_rate=10.0), warm=0.2)
    short, long = [(1, 1, 40, 0)], [(2, 2, 80, 0)]
    assert [tuple(part) for part in one.stretches] == short * 7 + long * 9


def test_a_pause_in_what_is_counted_is_told() -> None:
    """Of a week, in which nothing was recorded, as if the engine had been idle."""
    moments = [1e4 * n for n in range(10)] + [7e5 + n for n in range(90)]
    trace = [TraceRequest(moment * 1e3, 10, 1, []) for moment in moments]
    told = [simulate(trace, SIZE, always(()), machine(), warm=part) for part in (0.0, 0.1)]
    assert told[0].pause == pytest.approx(6.1e5 / 700_089) and told[1].pause == pytest.approx(
        1 / 89
    )
    assert ["no request came for 87%" in "".join(one.warnings) for one in told] == [True, False]


@pytest.mark.parametrize("rate", [FAST, 200.0], ids=["at once", "in a queue"])
def test_stretches_tell_whose_tokens_they_were(rate: float) -> None:
    """What the second half asks for was stored in the first; the engine's own cache has none. In a
    queue tiers load for others while these are served."""
    requests = chats(3, 150, 20.0)
    chain = always((tier("a", 10**4),))
    on = machine(engine_cache=50 * SIZE, prefill_rate=rate)
    one = simulate(requests, SIZE, chain, on, warm=0.5)
    assert sum(part.tier_tokens for part in one.stretches) == one.tier_hit_tokens > 0
    assert sum(part.computed_tokens for part in one.stretches) == one.computed_tokens > 0
    assert one.prompt_tokens == one.engine_hit_tokens + one.tier_hit_tokens + one.computed_tokens


def test_a_loaded_prompt_makes_room_for_one_before_it() -> None:
    def ask(second: float, *blocks: int) -> TraceRequest:
        return TraceRequest(second * 1000, len(blocks) * SIZE + 1, 1, list(blocks))

    x, y, more = (0, 1, 2), (10, 11, 12), (3, 4, 5, 6)
    evicts_both = range(20, 27)
    # The fifth waits for the fourth's load of x, and then for the blocks of the sixth behind it.
    trace = [ask(0, *x), ask(10, *y), ask(20, *evicts_both)]
    trace += [ask(30, *x), ask(30, *x, *more), ask(30, *y)]
    slow = {"a": TierProfile(load_bandwidth=FAST, store_bandwidth=FAST, load_latency=1)}
    report = simulate(
        trace, SIZE, always((tier("a", 100),)), machine(engine_cache=8 * SIZE, tiers=slow)
    )
    assert report.requests == 6
    assert blocks_of(report) == [6]
    assert report.engine_hit_tokens == 3 * SIZE


@pytest.mark.parametrize(("at_once", "waits"), [(2, 1 + 2 + 3 + 4), (8, 4 * 1)])
def test_as_many_loads_run_at_once_as_the_spec_says(at_once: int, waits: int) -> None:
    """Eight prompts at once, each with a block of its own that was stored before."""
    disk = {"type": "disk", "path": "/nowhere", "capacity": "1MiB", "loads_at_once": at_once}
    chain = load_chain({"version": 1, "load_when": "always", "tiers": [disk]})
    trace = [TraceRequest(second * 1e6, SIZE + 1, 1, [n]) for second in (0, 1) for n in range(8)]
    far = {"disk": TierProfile(load_bandwidth=FAST, store_bandwidth=FAST, load_latency=1)}
    report = simulate(trace, SIZE, chain, machine(tiers=far), warm=0.5)
    assert blocks_of(report) == [8]
    assert report.ttft_mean == pytest.approx(2 * waits / 8)


def test_what_is_expected_of_a_load_is_that_as_many_run_as_the_spec_says() -> None:
    """Computing takes six seconds, and a load one: of eight at once the last ends after four and
    a half, in the mean, where eight run, and after seven where two do."""
    disk = {"type": "disk", "path": "/nowhere", "capacity": "1MiB", "loads_at_once": 8}
    chain = load_chain({"version": 1, "tiers": [disk]})
    prompts = [TraceRequest(0.0, 65, 1, list(range(4 * n, 4 * n + 4))) for n in range(8)]
    far = {"disk": TierProfile(load_bandwidth=FAST, store_bandwidth=FAST, load_latency=1)}
    on = machine(tiers=far, prefill_rate=65 / 6)
    trace = [
        prompt._replace(timestamp=start * 1e6)
        for start, some in enumerate((prompts, prompts[:1], prompts))
        for prompt in some
    ]
    report = simulate(trace, SIZE, chain, on, warm=9 / 17)
    assert blocks_of(report) == [8 * 4]


def test_a_load_that_can_not_end_in_time_is_dropped_only_where_it_waits_for_others() -> None:
    """As `connector/worker/loading.py` drops it."""
    far = {"a": TierProfile(load_bandwidth=FAST, store_bandwidth=FAST, load_latency=2)}
    workload = Workload.of([TraceRequest(0.0, SIZE + 1, 1, [0])], SIZE)
    chain = SimChain((tier("a", 100),))
    (made,) = _tiers(chain, machine(tiers=far), workload)

    def load(now: float, late: float) -> tuple[float, int]:
        end, came = made.load(1, now, late)
        return round(end, 9), came

    assert load(0.0, 10.0) == (2.0, 1)
    made.measure(4.0)
    assert load(5.0, 6.0) == (6.0, 0)
    at_once = [load(10.0, 13.0) for _ in range(LOADS_AT_ONCE + 1)]
    assert at_once == [(12.0, 1)] * LOADS_AT_ONCE + [(12.0, 0)]


def test_a_write_budget_has_saved_nothing_at_the_start() -> None:
    """An hour's worth was there at once, which stored a recording whole; a device's life was that
    by the budget."""
    trace = [TraceRequest(second * 1e3, SIZE + 1, 1, [second]) for second in range(100)]
    disk = SimTier("a", "a", False, 1000 * SIZE, write_budget=SIZE / 4)
    (use,) = simulate(trace, SIZE, SimChain((disk,)), machine()).tiers
    assert 24 <= use.stored_bytes / SIZE <= 25
