"""Requests that ask for more than a tier's link carries: nobody waits longer than computing takes,
and the link goes on serving. The chain, its workers and the store are real; time is counted."""

from __future__ import annotations

import random

import pytest

from spec.chain import LOAD_POLICIES
from tests.lab.replay.worlds import BLOCK_BYTES, SIZE, chain, chats, disk, machine
from tiers.lab.replay.replay_trace import replay
from tiers.traces.trace import TraceRequest
from tiers.tuning.machine import TierProfile
from tiers.tuning.report import Report

BLOCKS = 16
"""Of each prompt."""
COMPUTING = 0.02
"""Seconds to compute a prompt, and to load it alone takes a quarter of that."""
LOADING = 0.25 * COMPUTING
PROMPTS, ASKED = 100, 500


def asked(load: float) -> list[TraceRequest]:
    """Each prompt once, and then any of them, `load` times as fast as the link carries them."""
    rng = random.Random(1)
    prompts = [[*range(n * BLOCKS, (n + 1) * BLOCKS)] for n in range(PROMPTS)]
    requests, moment = [], 0.0
    for number in range(PROMPTS + ASKED):
        blocks = prompts[number] if number < PROMPTS else rng.choice(prompts)
        requests.append(TraceRequest(moment, BLOCKS * SIZE + 1, 1, blocks))
        seconds = 1.0 if number < PROMPTS else rng.expovariate(load / LOADING)
        moment += 1000 * seconds
    return requests


def served(load: float, **settings: str) -> tuple[Report, float]:
    """What came of the second half of them, and the part of those that the link can carry."""
    speed = BLOCKS * BLOCK_BYTES / LOADING
    link = TierProfile(load_bandwidth=speed, store_bandwidth=100 * speed)
    on = machine(
        tiers={"disk": link},
        engine_cache=20 * BLOCKS * BLOCK_BYTES,
        prefill_rate=BLOCKS * SIZE / COMPUTING,
        gpus=4,
        step_tokens=BLOCKS * SIZE + 1,
        decode_seconds_per_token=0.0,
    )
    disks = chain(disk(2 * PROMPTS * BLOCKS), **settings)
    requests = asked(load)
    report = replay(requests, SIZE, disks, on, warm=0.5)
    carried = report.seconds / LOADING * BLOCKS * SIZE
    return report, report.tier_hit_tokens / carried


@pytest.mark.parametrize("policy", LOAD_POLICIES)
def test_past_its_capacity_a_link_keeps_nobody_waiting_and_goes_on_serving(policy: str) -> None:
    report, used = served(1.5, load_policy=policy, load_when="sooner")
    assert report.ttft_p50 < 1.5 * COMPUTING
    assert report.ttft_p99 < 4 * COMPUTING
    assert used > 0.8


def test_without_comparing_they_would_all_wait() -> None:
    """So that the test above can fail."""
    report, _ = served(1.5, load_when="always", max_wait="9s")
    assert report.ttft_p50 > 6 * COMPUTING


def test_prompts_that_are_loaded_make_room_for_one_before_them() -> None:
    """What they have loaded fills the engine, which has no room for the first in line."""
    link = TierProfile(load_bandwidth=80e6, store_bandwidth=8e6, load_latency=0.4)
    on = machine(engine_cache=60 * BLOCK_BYTES, gpus=2, tiers={"disk": link})
    requests = chats(5, every=60.0)
    report = replay(requests, SIZE, chain(disk(1000)), on)
    assert report.requests == len(requests)
