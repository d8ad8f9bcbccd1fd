"""What to change of a running chain, if anything: the present chain against the best one found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from spec.text import span
from tiers.traces.trace import TraceRequest
from tiers.tuning.search.chain_text import change, finite, name, percent
from tiers.tuning.search.search import Evaluated, Gap, Split, beats, gap
from tiers.tuning.search.tune import ENOUGH, Tuned
from tiers.tuning.simulation.simulate import simulate
from tiers.tuning.simulation.workload import Workload

RATES_OFF = 1.25
"""Rates measured at another load, or of another hour, are off by as much: a change is advised where
it is better with each of them so much higher and lower, too."""
WORTH = 0.02
"""A change costs blocks of the tiers that it touches, and somebody's time; less is not worth it."""


@dataclass(frozen=True)
class Advice:
    """What to do. `why`: in a sentence. `gap`: of the best chain from the present one; `worst` and
    `least`: its share where rates are off, the worst and the best case. `more`: how many
    more seconds to record, and requests that come meanwhile."""

    verdict: Literal["change", "stay", "record longer"]
    why: str
    gap: Gap | None = None
    worst: float | None = None
    least: float | None = None
    more: tuple[float, int] | None = None

    def as_json(self) -> dict[str, Any]:
        share, margin = self.gap or (None, None)
        return {
            "verdict": self.verdict,
            "why": self.why,
            "change": finite(share),
            "margin": finite(margin),
            "change_if_rates_are_off": [finite(self.least), finite(self.worst)],
            "more_seconds": self.more and self.more[0],
            "more_requests": self.more and self.more[1],
        }


def too_few(requests: Sequence[TraceRequest]) -> Advice | None:
    """The advice where no search of so few requests means anything; None: they are enough."""
    split = Split()
    needed = round(ENOUGH / min(split.searched - split.warm, 1 - split.searched))
    more = needed - len(requests)
    if more <= 0:
        return None
    lasted = _lasted(requests)
    time = lasted / len(requests) * more
    why = (
        f"{len(requests):,} requests in {span(lasted)} are too few to tell chains apart: "
        f"{needed:,} are needed at least. Record {more:,} more, for about {span(time)} as they "
        "come"
    )
    return Advice("record longer", why, more=(time, more))


def advise(tuned: Tuned, requests: Sequence[TraceRequest], block_tokens: int) -> Advice:
    """Compare the chain chosen near the present one with it, on requests that no choice saw."""
    best, present, budget = tuned.judged["chosen"], tuned.judged["present"], tuned.budget
    if best.chain == present.chain:
        idle = [use.name for use in present.report.tiers if not use.hit_tokens]
        more = f"; {' and '.join(idle)} served no token of these requests" if idle else ""
        return _nothing_better(tuned, requests, f"No chain that was tried is better{more}", None)
    found = gap(best.report, present.report, budget)
    shares = [found.share, *_off(best, present, tuned, requests, block_tokens)]
    least, worst = min(shares), max(shares)
    changed = (
        f"{name(best.chain)}: {budget.objective} comes to {change(found, budget.objective)}; "
        f"between {least:+.0%} and {worst:+.0%} where rates are a quarter off"
    )
    keeps_more = best.score.excess < present.score.excess
    if beats(best.report, present.report, budget) and (worst <= -WORTH or keeps_more):
        return Advice("change", changed, found, worst, least)
    little = "too little to tell" if not found.is_certain else f"less than {percent(WORTH)}"
    advice = _nothing_better(tuned, requests, f"The best found, {changed}: {little}", found)
    return replace(advice, worst=worst, least=least)


def _nothing_better(
    tuned: Tuned, requests: Sequence[TraceRequest], why: str, found: Gap | None
) -> Advice:
    """Stay, unless the recording is too short to fill any tier and reuse has not settled."""
    present, lasted = tuned.judged["present"], _lasted(requests)
    used = zip(present.chain.tiers, present.report.tiers, strict=True)
    fills = [
        lasted * ((tier.capacity or 0) / max(1, use.held_bytes) - 1)
        for tier, use in used
        if use.held_bytes is not None
    ]
    if tuned.growth is None or len(fills) < len(present.chain.tiers):
        return Advice("stay", why, found)
    more = max(lasted, min(fills, default=0.0))
    why += (
        f". But {span(lasted)} fill none of the tiers, and the traffic has not settled "
        f"({tuned.growth}): what comes back later is not in it. Record for another {span(more)}"
    )
    return Advice("record longer", why, found, more=(more, round(len(requests) / lasted * more)))


def _off(
    best: Evaluated,
    present: Evaluated,
    tuned: Tuned,
    requests: Sequence[TraceRequest],
    block_tokens: int,
) -> Iterator[float]:
    """How the best chain compares with the present one for machines whose rates are off."""
    workload, machine = Workload.of(requests, block_tokens), tuned.budget.machine
    for factor in (RATES_OFF, 1 / RATES_OFF):
        tiers = {
            key: tier.model_copy(
                update={
                    "load_bandwidth": tier.load_bandwidth * factor,
                    "store_bandwidth": tier.store_bandwidth * factor,
                    "load_latency": tier.load_latency / factor,
                }
            )
            for key, tier in machine.tiers.items()
        }
        for update in ({"prefill_rate": machine.prefill_rate * factor}, {"tiers": tiers}):
            off = machine.model_copy(update=update)
            budget = tuned.budget.model_copy(update={"machine": off})
            ours, theirs = (
                simulate(workload, block_tokens, one.chain, off, warm=tuned.split.searched)
                for one in (best, present)
            )
            yield gap(ours, theirs, budget).share


def _lasted(requests: Sequence[TraceRequest]) -> float:
    return max(1e-3, (requests[-1].timestamp - requests[0].timestamp) / 1000)
