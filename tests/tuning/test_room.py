"""The simulation and real replays where loads hold the engine's memory: both go by vLLM's rules."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

import pytest

from tests.lab.replay.worlds import BLOCK_BYTES, SIZE, chain, disk, machine
from tiers.lab.replay.replay_trace import replay
from tiers.traces.trace import TraceRequest
from tiers.tuning.machine import TierProfile
from tiers.tuning.report import TRUSTED_ROOM_WAIT, Report
from tiers.tuning.simulation.simulate import simulate

NEW = count(1 << 20)


def document(blocks: int) -> list[int]:
    return [next(NEW) for _ in range(blocks)]


class Prompt(NamedTuple):
    blocks: list[int]
    after: float = 0.0
    """Milliseconds after the first."""
    answer: int = 1


def served(
    prompts: Sequence[Prompt],
    stored: Sequence[list[int]],
    bandwidth: float = 8e6,
    when: str = "always",
    **more: Any,
) -> tuple[Report, Report]:
    """The prompts alone, replayed and simulated, after documents that the disk has by then, and
    the engine, of 71 blocks, has no more."""
    link = TierProfile(load_bandwidth=bandwidth, store_bandwidth=8e6)
    on = machine(engine_cache=71 * BLOCK_BYTES, tiers={"disk": link}, step_tokens=2048, **more)
    known = [*stored, document(70)]
    requests = [
        TraceRequest(20_000.0 * number, len(blocks) * SIZE + 1, 1, blocks)
        for number, blocks in enumerate(known)
    ]
    begin = 20_000.0 * len(known)
    requests += [
        TraceRequest(begin + one.after, len(one.blocks) * SIZE + 1, one.answer, one.blocks)
        for one in prompts
    ]
    tiers = chain(disk(4000), staging=200 * BLOCK_BYTES, load_when=when)
    warm = (len(known) + 0.5) / len(requests)
    real, simulated = (f(requests, SIZE, tiers, on, warm=warm) for f in (replay, simulate))
    assert real.requests == simulated.requests == len(prompts)
    assert simulated.hit_tokens == real.hit_tokens
    assert waits(simulated) == pytest.approx(waits(real), rel=0.02)
    assert simulated.room_wait == pytest.approx(real.room_wait, abs=0.01)
    return real, simulated


def waits(report: Report) -> list[float]:
    """Of up to 16 prompts, in the order in which they ended."""
    return [stretch.ttft_mean for stretch in report.stretches]


LOAD = 40 * BLOCK_BYTES / 8e6


def test_who_waits_for_anothers_load_keeps_nobody_waiting() -> None:
    """However few blocks are free: vLLM skips a request whose tokens are not known yet."""
    shared = document(40)
    real, _ = served([Prompt(shared), Prompt(shared + document(5)), Prompt(document(3))], [shared])
    assert waits(real)[0] == pytest.approx(3 * SIZE / 4000, rel=0.1)
    assert waits(real)[1] == pytest.approx(LOAD + 5 * SIZE / 4000, rel=0.02)


def test_who_has_loaded_runs_before_who_finds_no_room() -> None:
    """Though that came first: it has its blocks, and gives them back."""
    shared, other = document(40), document(15)
    first = Prompt(shared, answer=400)  # and holds its blocks for 0.8 s
    real, _ = served([first, Prompt(shared + document(15)), Prompt(other)], [shared, other])
    assert waits(real)[1] == pytest.approx(LOAD * 55 / 40, rel=0.02)
    assert waits(real)[2] < 0.3


def test_nobody_waits_for_a_load_that_is_much_longer() -> None:
    long = document(40)
    real, _ = served([Prompt(long), Prompt(long[:10])], [long])
    assert real.tier_hit_tokens == 50 * SIZE


def test_who_computed_the_same_gives_a_copy_back() -> None:
    """Two prompts compute the same blocks in one step, each into blocks of its own."""
    same = document(30)
    prompts = [
        Prompt(document(3)),
        Prompt(same, 1.0),
        Prompt(same, 1.0, answer=500),
        Prompt(document(35), 1.0),
    ]
    real, _ = served(prompts, [document(1)])
    assert waits(real)[-1] < 0.5, "before the second one's answer has ended"


def test_a_load_that_takes_long_is_seen_while_it_does() -> None:
    """A tier that was never measured counts as fast as its first load has been so far."""
    slow, other = document(50), document(15)
    steps = [Prompt(document(1), after) for after in (100.0, 200.0, 300.0)]
    prompts = [Prompt(slow), *steps, Prompt(other, 305.0)]
    real, _ = served(prompts, [slow, other], 1e6, "sooner")
    assert real.tier_hit_tokens == 50 * SIZE


@pytest.mark.parametrize("blocks", [90, 900])
def test_a_report_tells_where_prompts_wait_for_room(blocks: int) -> None:
    """GPUs and links are idle, and yet times are not to be trusted."""
    documents = [document(40) for _ in range(6)]
    requests = [
        TraceRequest(90.0 * number, 40 * SIZE + 1, 100, documents[number % 6])
        for number in range(96)
    ]
    link = TierProfile(load_bandwidth=40e6, store_bandwidth=40e6)
    on = machine(
        engine_cache=blocks * BLOCK_BYTES,
        tiers={"disk": link},
        prefill_rate=40000,
        step_tokens=2048,
    )
    for serve in (replay, simulate):
        report = serve(requests, SIZE, chain(disk(4000)), on, warm=0.25)
        assert not any("are busy for" in text for text in report.warnings)
        if blocks > 600:
            assert not report.warnings and not report.room_wait
            free = on.model_copy(update={"decode_seconds_per_token": 0.0})
            (warning,) = serve(requests, SIZE, chain(disk(4000)), free, warm=0.25).warnings
            assert warning.startswith("answers are taken to need no time")
            alone = [one._replace(output_length=1) for one in requests]
            assert not serve(alone, SIZE, chain(disk(4000)), free, warm=0.25).warnings, "no answers"
            continue
        assert report.room_wait > TRUSTED_ROOM_WAIT
        (warning,) = report.warnings
        assert warning.startswith("prompts wait for room in the engine's memory for ")
