"""How does an engine do now? Its status, added up from what its chain measures."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from spec.chain import ChainSpec
from spec.offloading import OffloadingSpec
from tiers.connector.multi.multi_scheduler import MultiScheduler
from tiers.connector.scheduler.offloading_scheduler import OffloadingScheduler
from tiers.contract.stats import CHAIN, COUNTERS, LAST, TierStats, tokens_loaded
from tiers.control.change_watch import Saved
from tiers.control.engine_status import EngineStatus, GhostStatus, Percentiles, TierStatus

WINDOW = 60.0
"""Seconds over which rates and shares of late are taken, about."""
MARKS = 6
"""Counts of before that are kept for that; a window is longer by one part of these at most."""
SAMPLES = 512
"""Samples of a histogram whose percentiles are given: the last ones."""
HISTORY = 2 * 3600.0
"""Seconds for which it is kept what the tiers have saved, for whoever judges a change."""
HISTORY_STEP = 1.0
DROPPED = "store_dropped_"
Sums = dict[str, dict[str, float]]


class StatusBoard:
    """Adds up what a chain measures. The scheduler's thread calls `measured`, any thread `status`.

    The scheduler's thread alone writes; a reader copies each dict in one call, while it holds the
    interpreter.
    """

    def __init__(
        self, scheduler: MultiScheduler, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`scheduler`: of a chain."""
        assert scheduler.changes is not None, "it has no chain"
        self._scheduler, self._changes = scheduler, scheduler.changes
        self._now = now
        self._began = now()
        self._last: float | None = None
        self._sums: Sums = {}
        self._samples: dict[tuple[str, str], deque[float]] = {}
        self._history: deque[tuple[float, Saved]] = deque(
            [(self._began, Saved(0.0, 0.0))], maxlen=int(HISTORY / HISTORY_STEP)
        )
        self._marks: deque[tuple[float, Sums]] = deque([(self._began, {})], maxlen=MARKS + 1)

    def measured(self, stats: Mapping[str, Any]) -> None:
        """Take what `MultiScheduler.stats_by_child` gave: measures since the last call."""
        now = self._last = self._now()
        if now - self._marks[-1][0] >= WINDOW / MARKS:
            self._marks.append((now, {tier: dict(sums) for tier, sums in self._sums.items()}))
        for tiers in stats.values():
            for tier, measures in tiers.data.items() if isinstance(tiers, TierStats) else ():
                sums = self._sums.setdefault(tier, {})
                for name, value in measures.items():
                    if isinstance(value, list):
                        kept = self._samples.setdefault((tier, name), deque(maxlen=SAMPLES))
                        kept.extend(value)
                    elif name in LAST:
                        sums[name] = value
                    else:
                        sums[name] = sums.get(name, 0.0) + value
        if now - self._history[-1][0] >= HISTORY_STEP:
            self._history.append((now, self._saved()))

    def _saved(self) -> Saved:
        seconds = sum(
            of_tenant.get("tenant_prefill_seconds", 0.0) - of_tenant.get("tenant_load_seconds", 0.0)
            for of_tenant in list(self._sums.values())
        )
        return Saved(self._sums.get(CHAIN, {}).get("prompt_tokens", 0.0), seconds)

    def saved(self, since: float, until: float, parts: int) -> list[Saved]:
        """See `SavedHistory`. Of a time before the engine's start there are fewer parts."""
        history = [*list(self._history), (self._now(), self._saved())]
        times = [at for at, _ in history]
        step = (until - since) / parts
        ends = [since + step * number for number in range(parts + 1)]
        at_ends = [history[bisect_right(times, end) - 1][1] for end in ends if end >= history[0][0]]
        return [
            Saved(after.prompt_tokens - before.prompt_tokens, after.seconds - before.seconds)
            for before, after in pairwise(at_ends)
        ]

    def store_rates(self, ranks: int) -> dict[str, float]:
        """Bytes a second that each tier stored while a job of it ran, by the last jobs, as if all
        ranks store at once. Raises RuntimeError if something grew while it was read."""
        samples = {key: sum(values) for key, values in list(self._samples.items())}
        return {
            tier: ranks * samples[tier, "store_size_bytes"] / seconds
            for (tier, name), seconds in samples.items()
            if name == "store_seconds" and seconds and (tier, "store_size_bytes") in samples
        }

    def status(self, version: str) -> EngineStatus:
        """The status now. Raises RuntimeError if something grew while it was read."""
        now = self._now()
        sums = {tier: dict(of_tier) for tier, of_tier in list(self._sums.items())}
        marks = list(self._marks)
        # The oldest that lies within the window, or else the newest.
        since, before = next((mark for mark in marks if now - mark[0] <= WINDOW), marks[-1])
        late: Sums = {
            tier: {name: value - before.get(tier, {}).get(name, 0.0) for name, value in s.items()}
            for tier, s in sums.items()
        }
        seconds = max(now - since, 1e-3)
        of_chain, of_chain_late = sums.get(CHAIN, {}), late.get(CHAIN, {})
        prompts = of_chain.get("prompt_tokens", 0.0), of_chain_late.get("prompt_tokens", 0.0)
        chain, version_of_chain = self._changes.chain, self._changes.version
        children = dict(zip(self._scheduler.names, self._scheduler.children, strict=False))
        tiers = [
            self._tier(spec, child, sums.get(name, {}), late.get(name, {}), prompts, seconds)
            for spec in chain.tiers
            if isinstance(child := children.get(name := spec.tier_name), OffloadingScheduler)
        ]
        rates = (of_tier.get("prefill_tokens_per_second") for of_tier in sums.values())
        prefill = next(filter(None, rates), None)
        return EngineStatus(
            version=version,
            load_policy=chain.load_policy,
            chain_version=version_of_chain,
            up_seconds=now - self._began,
            measured_seconds_ago=None if self._last is None else now - self._last,
            window_seconds=seconds,
            prompt_tokens=prompts[0],
            prompt_tokens_late=prompts[1],
            prefill_tokens_per_second=prefill,
            tiers=tiers,
            ghosts=[*_ghosts(chain, sums, prefill)],
        )

    def _tier(
        self,
        spec: OffloadingSpec,
        child: OffloadingScheduler,
        sums: Mapping[str, float],
        late: Mapping[str, float],
        prompts: tuple[float, float],
        seconds: float,
    ) -> TierStatus:
        name = spec.tier_name
        state, why = child.condition()
        used, capacity = child.room()
        tokens, rate = tokens_loaded(sums), sums.get("load_tokens_per_second")
        # Of all ranks, and of a load's own blocks: what a token takes here.
        token_bytes = sums.get("loaded_bytes", 0.0) / tokens if tokens else None
        return TierStatus(
            name=name,
            type=spec.type,
            state=state,
            why=why,
            paused=spec.paused or "",
            capacity_bytes=capacity,
            used_bytes=used,
            token_share=_share(sums.get("loaded_tokens", 0.0), prompts[0]),
            token_share_late=_share(late.get("loaded_tokens", 0.0), prompts[1]),
            loaded_bytes_per_second=late.get("loaded_bytes", 0.0) / seconds,
            stored_bytes_per_second=late.get("stored_bytes", 0.0) / seconds,
            measured_load_bytes_per_second=rate * token_bytes if rate and token_bytes else None,
            load_latency_seconds=sums.get("load_latency_seconds"),
            loading_jobs=sums.get("loading_jobs", 0.0),
            storing_jobs=sums.get("storing_jobs", 0.0),
            lookup_seconds=Percentiles.of(list(self._samples.get((name, "lookup_seconds"), ()))),
            load_seconds=Percentiles.of(list(self._samples.get((name, "load_seconds"), ()))),
            dropped_blocks={
                measure.removeprefix(DROPPED): value
                for measure, value in sums.items()
                if measure.startswith(DROPPED) and value
            },
            sums={measure: value for measure, value in sums.items() if measure in COUNTERS},
        )


def _ghosts(chain: ChainSpec, sums: Sums, prefill: float | None) -> Iterator[GhostStatus]:
    """Tiers that have ghosts, as they are, and their ghosts. `prefill`: tokens a second."""
    rates = {tier: of_tier.get("load_tokens_per_second") for tier, of_tier in sums.items()}
    loads = ((s.get("loaded_bytes"), tokens_loaded(s)) for s in sums.values())
    token_bytes = next((size / tokens for size, tokens in loads if size and tokens), None)
    shown: dict[str, float | None] = {}
    for ghost in chain.ghosts:
        rate = rates.get(ghost.tier)
        if ghost.load_rate is not None:
            rate = ghost.load_rate / token_bytes if token_bytes else None
        else:
            shown[ghost.tier] = rate
        shown[ghost.label] = rate
    for name, rate in shown.items():
        of_ghost = sums.get(name, {})
        hits, error = of_ghost.get("ghost_hit_ratio"), of_ghost.get("ghost_hit_error")
        if hits is not None and error is not None:
            seconds = 1000 * (hits / rate + (1 - hits) / prefill) if rate and prefill else None
            yield GhostStatus(tier=name, hit_ratio=hits, error=error, prompt_seconds=seconds)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
