"""The report of a replay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from spec.chain import ChainSpec
from tiers.connector.observers import GhostWatcher
from tiers.contract.stats import Measures
from tiers.lab.replay.trace_engine import TraceEngine
from tiers.tuning.machine import Machine, size_of
from tiers.tuning.report import DAY, GhostUse, Report, TierUse, quantile, stretches


@dataclass(frozen=True)
class Mark:
    """What had been done at a moment. `links`: seconds of loads and of stores by tier. `stats`:
    the chain's own counts. `ended`: when the last request did."""

    now: float
    ended: float
    links: Mapping[str, tuple[float, float]]
    stats: Mapping[str, Measures]


GHOST_SECONDS = 60.0
"""Ghosts may count so long at the end: they look at a million blocks in a second."""
DROPPED = ("store_dropped_no_slot", "store_dropped_inflight", "store_dropped_budget")
"""Counters of blocks that a tier lacked and its rules admitted."""


def report_of(
    engine: TraceEngine,
    chain: ChainSpec,
    machine: Machine,
    marks: tuple[Mark, Mark],
    ghosts: Sequence[GhostWatcher],
) -> Report:
    """What was done between two marks, and what came of the requests that count."""
    start, _ = marks
    outcome = engine.outcome
    seconds = max(start.ended - start.now, 1e-9)
    waits = sorted(one.wait for one in outcome.served)
    return Report(
        requests=outcome.requests,
        seconds=seconds,
        gpu_load=outcome.busy / seconds / machine.gpus,
        tiers=tuple(
            _use(engine, chain, machine, tier.tier_name, place, marks, seconds)
            for place, tier in enumerate(chain.tiers)
        ),
        prompt_tokens=outcome.prompt_tokens,
        engine_hit_tokens=outcome.own_tokens,
        computed_tokens=outcome.computed_tokens,
        ttft_mean=sum(waits) / len(waits) if waits else 0.0,
        ttft_p50=quantile(waits, 0.5),
        ttft_p99=quantile(waits, 0.99),
        prefill_seconds_saved=sum(outcome.tier_tokens.values()) / machine.prefill_rate,
        stretches=stretches(outcome.served),
        ghosts=tuple(one for watcher in ghosts for one in _ghosts(watcher)),
    )


def _ghosts(watcher: GhostWatcher) -> Iterator[GhostUse]:
    """What they say when all requests are counted."""
    watcher.close(GHOST_SECONDS)
    for name, said in watcher.take_measures().items():
        values = (said[f"ghost_{what}"] for what in ("hit_ratio", "hit_error", "store_ratio"))
        yield GhostUse(name, *values)


def _use(
    engine: TraceEngine,
    chain: ChainSpec,
    machine: Machine,
    name: str,
    place: int,
    marks: tuple[Mark, Mark],
    seconds: float,
) -> TierUse:
    start, end = marks
    tier = chain.tiers[place]
    profile = machine.profile(name, tier.type)
    size = engine.block_tokens * machine.kv_bytes_per_token * profile.stored_share

    def grown(counter: str) -> int:
        return int(_count(end, name, counter) - _count(start, name, counter))

    stored, dropped = grown("stored_blocks"), sum(map(grown, DROPPED))
    loads, stores = (end.links[name][way] - start.links[name][way] for way in (0, 1))
    a_day = stored * size / seconds * DAY
    return TierUse(
        name=name,
        hit_tokens=engine.outcome.tier_tokens[name],
        load_busy=loads / seconds,
        store_busy=stores / seconds,
        loaded_bytes=int(grown("loaded_blocks") * size),
        stored_bytes=int(stored * size),
        written_bytes_per_day=a_day,
        offered_blocks=stored + dropped,
        dropped_blocks=dropped,
        life_years=profile.life_years(a_day, getattr(tier, "write_budget", None)),
        price_per_month=profile.price(size_of(tier)),
    )


def _count(mark: Mark, tier: str, counter: str) -> float:
    value = mark.stats.get(tier, {}).get(counter, 0.0)
    return value if isinstance(value, int | float) else 0.0
