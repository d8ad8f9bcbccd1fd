"""The simulation against the real chain where stores lag, are dropped, or kept out by rules."""

from __future__ import annotations

from typing import Any

import pytest

from spec.chain import LOAD_POLICIES, ChainSpec
from tests.lab.replay.worlds import (
    BLOCK_BYTES,
    KV_BYTES,
    SIZE,
    answered,
    chain,
    chats,
    cpu,
    disk,
    machine,
)
from tiers.lab.replay.links import QUANTUM_BYTES
from tiers.lab.replay.replay_trace import replay
from tiers.traces.trace import TraceRequest
from tiers.tuning.machine import TierProfile
from tiers.tuning.report import Report
from tiers.tuning.simulation.simulate import simulate

SLOW = {
    "cpu": TierProfile(load_bandwidth=20e6, store_bandwidth=20e6),
    "disk": TierProfile(load_bandwidth=8e6, store_bandwidth=3e5),
}
CHAINS: dict[str, Any] = {
    **{
        f"{name}, {when}": {"load_policy": name, "load_when": when}
        for name, when in zip(LOAD_POLICIES, ("always", "sooner", "always"), strict=True)
    },
    "no promotion": {"promote": False},
}
TIERS: dict[str, Any] = {
    "threshold": {"store_threshold": 2},
    "rate": {"store_rate": "200kB/s"},
    "inflight": {"max_inflight": 160_000},
}


def assert_agree(real: Report, simulated: Report) -> None:
    """Below the load to which times are trusted: hit tokens within 1% of all, p50 within 20%."""
    assert real.gpu_load < 0.65
    near = real.prompt_tokens / 100
    assert simulated.engine_hit_tokens == pytest.approx(real.engine_hit_tokens, abs=near)
    assert simulated.hit_tokens == pytest.approx(real.hit_tokens, abs=near)
    assert simulated.ttft_p50 == pytest.approx(real.ttft_p50, rel=0.2)
    for one, other in zip(simulated.tiers, real.tiers, strict=True):
        assert one.dropped_share == pytest.approx(other.dropped_share, abs=0.03)


@pytest.mark.parametrize("name", CHAINS)
def test_the_simulation_agrees_where_stores_lag_and_drop(name: str) -> None:
    slow, requests = machine(tiers=SLOW), chats(5)
    tiers = chain(cpu(160), disk(600), **CHAINS[name])
    real = replay(requests, SIZE, tiers, slow)
    assert real.tiers[1].dropped_share > 0.1
    assert_agree(real, simulate(requests, SIZE, tiers, slow))


def test_the_simulation_agrees_where_memory_is_stored_in_late() -> None:
    """Blocks on their way into host memory hold slots, which others lose."""
    small = machine(engine_cache=40 * BLOCK_BYTES)
    link = TierProfile(load_bandwidth=20e6, store_bandwidth=6e5)
    late = small.model_copy(update={"tiers": {"cpu": link}})
    tiers, requests = chain(cpu(160)), chats(5, every=60.0)
    real, at_once = (replay(requests, SIZE, tiers, links) for links in (late, small))
    simulated = simulate(requests, SIZE, tiers, late)
    near = real.prompt_tokens / 100
    assert real.tier_hit_tokens < at_once.tier_hit_tokens - 20 * near
    assert simulated.tier_hit_tokens == pytest.approx(real.tier_hit_tokens, abs=near)
    assert simulated.ttft_mean == pytest.approx(real.ttft_mean, rel=0.05)


def test_the_simulation_agrees_where_loads_share_a_link_with_slower_stores() -> None:
    large = QUANTUM_BYTES // BLOCK_BYTES  # loads and stores take turns block by block
    link = TierProfile(load_bandwidth=8e6 * large, store_bandwidth=2e6 * large, shared_link=True)
    shared = machine(
        kv_bytes_per_token=KV_BYTES * large,
        engine_cache=60 * BLOCK_BYTES * large,
        tiers={"disk": link},
    )
    staging = 100 * BLOCK_BYTES * large
    tiers = ChainSpec.model_validate(
        {"version": 1, "load_when": "always", "staging": staging, "tiers": [disk(600 * large)]}
    )
    requests = chats(5)
    real, simulated = (serve(requests, SIZE, tiers, shared) for serve in (replay, simulate))
    assert real.tier_hit_tokens > real.prompt_tokens / 10
    assert_agree(real, simulated)
    assert simulated.ttft_mean == pytest.approx(real.ttft_mean, rel=0.05)


def test_the_simulation_agrees_on_loads_at_once() -> None:
    """Of a tier whose loads wait for their first bytes; two at once would wait for each other."""
    link = TierProfile(load_bandwidth=80e6, store_bandwidth=8e6, load_latency=0.4)
    far = machine(engine_cache=100 * BLOCK_BYTES, gpus=2, tiers={"disk": link})
    tiers, requests = chain(disk(1000, loads_at_once=8)), chats(5, every=60.0)
    real, simulated = (serve(requests, SIZE, tiers, far) for serve in (replay, simulate))
    assert real.tier_hit_tokens > 0
    assert_agree(real, simulated)
    assert simulated.ttft_mean == pytest.approx(real.ttft_mean, rel=0.05)


@pytest.mark.parametrize("store", ["all", "prompt"])
def test_the_simulation_agrees_on_answers(store: str) -> None:
    """The engine keeps what an answer filled, and so do tiers, if they are let."""
    small, plain = machine(engine_cache=70 * BLOCK_BYTES), chats(5)
    requests = answered(plain)
    assert sum(len(request.answer_blocks) for request in requests) > 100
    tiers = chain(cpu(160), disk(600), store=store)
    real, without = replay(requests, SIZE, tiers, small), simulate(plain, SIZE, tiers, small)
    assert_agree(real, simulate(requests, SIZE, tiers, small))
    assert real.engine_hit_tokens + real.tier_hit_tokens > (
        without.engine_hit_tokens + without.tier_hit_tokens + 50 * SIZE
    )


@pytest.mark.parametrize("gpus", [1, 2])
def test_copies_that_begin_in_one_step_are_computed_once(gpus: int) -> None:
    """As by vLLM, whose `allocate_slots` notes a step's blocks when the step is planned. A second
    GPU, which begins at the same time, computes them once more."""
    usual = machine(engine_cache=400 * BLOCK_BYTES, gpus=gpus)
    requests = []
    for burst in range(10):
        first = 1000 * burst
        busy = [range(first + 100 * n, first + 100 * n + 40) for n in range(1, 1 + gpus)]
        requests += [TraceRequest(1e3 * burst, 643, 1, list(one)) for one in busy]
        copy = TraceRequest(1e3 * burst + 1, 323, 1, list(range(first, first + 20)))
        requests += 6 * [copy]
    tiers = chain(cpu(160), disk(600))
    real, simulated = replay(requests, SIZE, tiers, usual), simulate(requests, SIZE, tiers, usual)
    assert_agree(real, simulated)
    shared = 10 * (6 - gpus) * 20 * SIZE
    assert real.engine_hit_tokens == simulated.engine_hit_tokens == shared


@pytest.mark.parametrize("name", TIERS)
def test_the_simulation_agrees_on_rules_of_stores(name: str) -> None:
    usual, requests = machine(engine_cache=60 * BLOCK_BYTES), chats(6)
    tiers = chain(cpu(160), disk(600, **TIERS[name]))
    real = replay(requests, SIZE, tiers, usual)
    assert real.tier_hit_tokens > 0
    assert_agree(real, simulate(requests, SIZE, tiers, usual))


@pytest.mark.parametrize("rate", [0.1e6, 0.5e6, 3e6])
def test_the_simulation_charges_what_measuring_a_slow_tier_costs(rate: float) -> None:
    """A tier that was never measured is loaded from and ended early; from then on what is computed
    sooner is computed, and the tier probed now and then. Computing is as fast as 4 MB/s."""
    links = {"disk": TierProfile(load_bandwidth=rate, store_bandwidth=8e6)}
    slow = machine(engine_cache=60 * BLOCK_BYTES, tiers=links)
    tiers = chain(disk(1000), load_when="sooner")
    documents = ([100 * (n % 3) + block for block in range(30)] for n in range(24))
    requests = [TraceRequest(9e3 * n, 485, 1, one) for n, one in enumerate(documents)]
    real, simulated = replay(requests, SIZE, tiers, slow), simulate(requests, SIZE, tiers, slow)
    assert_agree(real, simulated)
    assert simulated.ttft_mean == pytest.approx(real.ttft_mean, rel=0.05)
    both = [report.tiers[0].load_busy for report in (simulated, real)]
    assert 0 < both[0] == pytest.approx(both[1], abs=0.05)
    blind = simulate(requests, SIZE, chain(disk(1000)), slow)
    assert blind.computed_tokens < simulated.computed_tokens


@pytest.mark.parametrize("serve", [replay, simulate])
@pytest.mark.parametrize("bandwidth", [5e5, 2e6])
def test_one_slow_link_costs_the_default_no_more_than_noise(serve: Any, bandwidth: float) -> None:
    """Loading from there takes twice or eight times as long as computing; stores keep up."""
    slow = TierProfile(load_bandwidth=bandwidth, store_bandwidth=20e6)
    links = {"cpu": SLOW["cpu"], "disk": slow}
    on = machine(tiers=links, engine_cache=40 * BLOCK_BYTES)
    requests = chats(5, count=240, every=160.0)

    def mean(*tiers: Any) -> float:
        spec = {"version": 1, "staging": 40 * BLOCK_BYTES, "tiers": tiers}
        report: Report = serve(requests, SIZE, ChainSpec.model_validate(spec), on, warm=0.5)
        return report.ttft_mean

    assert mean(cpu(80), disk(600)) < 1.02 * mean(cpu(80))


def test_the_simulation_agrees_on_a_write_budget_once_its_first_hour_s_worth_is_spent() -> None:
    """The last two of four hours. Some kB a second are too little for blocks as large as these."""
    large, requests = 16, chats(6, every=120_000.0)
    small = machine(kv_bytes_per_token=KV_BYTES * large, engine_cache=60 * BLOCK_BYTES * large)
    spared = disk(600 * large, write_budget="4096B/s")
    tiers = chain(cpu(160 * large), spared, staging=40 * BLOCK_BYTES * large)
    real = replay(requests, SIZE, tiers, small, warm=0.5)
    simulated = simulate(requests, SIZE, tiers, small, warm=0.5)
    assert real.hit_tokens["disk"] > 0 and real.tiers[1].dropped_share > 0.5
    assert_agree(real, simulated)
