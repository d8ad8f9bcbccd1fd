"""LoadCost: how long a load from a tier would take, from how long its loads took."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from spec.offloading import LOADS_AT_ONCE
from tiers.loading.shares import LoadPace

LEAST_TOKENS = 64
"""Of the shortest load by which a tier is probed."""
MOST_DOUBT = 10
"""Failed loads in a row beyond which a tier is not doubted more: it then counts as a thousand
times slower than measured."""
LEAST_SECONDS = 1e-9
"""For a block, where a fit has no cost."""
ROUNDING = 1e-9
"""The part of a cost that may be all rounding."""
HEARD = 64
"""Loads of which the one that the engine took least time for, beside its own, counts."""


@dataclass
class _Load:
    tokens: int
    beside: int
    ordered: float
    steps: int = 0
    began: float = math.inf


class LoadCost:
    """One tier's loads, in tokens: ranks and KV cache groups then need no counting apart.

    A sample is what the slowest rank's load took, from its first byte to its last: neither its wait
    for other loads, which is estimated from those in flight, nor the engine's steps, which
    a long prefill of another request would else charge to the tier. A tier counts as twice as slow
    with each failed load in a row. Used by one thread alone; `now` gives seconds, never going back.
    `at_once`: loads that run together; the others wait.
    """

    def __init__(self, now: Callable[[], float], at_once: int = LOADS_AT_ONCE) -> None:
        self._now = now
        self._at_once = at_once
        self._fitted = LoadLine()
        self._loads: dict[int, _Load] = {}
        self._queued = 0
        self._stepped = -math.inf
        self._engines: deque[float] = deque(maxlen=HEARD)
        self.failures = 0
        """Loads in a row that did not bring all they should."""

    def began(self, job_id: int, tokens: int) -> None:
        self._loads[job_id] = _Load(tokens, self._beside, self._now())
        self._queued += tokens

    def stepped(self) -> None:
        """The engine begins a step.

        With the second that begins after a load was ordered the workers have begun that load, in
        engines that prepare one step while another runs, too.
        """
        self._stepped = self._now()
        for load in self._loads.values():
            load.steps += 1
            if load.steps == 2:
                load.began = self._stepped

    def ended(
        self, job_id: int, seconds: float, whole: bool, arrived: int = 0, late: bool = False
    ) -> None:
        """A load has ended on all ranks, after `seconds` of its own. `arrived`: tokens, of
        one that did not bring all it should; `late`: since its time was over, or it was not wanted
        any more, which took no time.

        What has arrived is a sample. Of a late load of which nothing has, that it took so long at
        least: else a tier whose loads are all late would never be measured.
        """
        load = self._loads.pop(job_id)
        self._queued -= load.tokens
        if whole:
            self.failures = 0
        elif not late:
            self.failures += 1
        line = self._fitted.line
        slow = late and seconds > (line.seconds(load.tokens) if line is not None else 0.0)
        tokens = load.tokens if whole or (slow and not arrived) else arrived
        if tokens and seconds > 0:
            # What moved beside it, from its beginning or to its end, took a part of the tier.
            others = (load.beside + self._beside) / 2
            self._fitted.add(tokens, seconds / (1 + others))
        if whole and not load.beside and not self._loads:
            self._engines.append(max(0.0, self._now() - load.ordered - seconds))

    @property
    def line(self) -> LinearFit | None:
        """Seconds by tokens of a load that nothing else delays; None: not measured yet."""
        return self._fitted.line

    def gauges(self) -> dict[str, float]:
        """What is known of the tier's speed, as `GAUGES` name it."""
        line = self._fitted.line
        if line is None:
            return {}
        rate = {"load_tokens_per_second": 1 / line.each} if line.each else {}
        engine = self.engine_seconds
        return {"load_latency_seconds": line.fixed, "load_engine_seconds": engine, **rate}

    @property
    def engine_seconds(self) -> float:
        """What the engine takes at the least to order a load and to go on with its request, beside
        the load's own seconds: a few milliseconds, in which it computes a short prefix."""
        return min(self._engines, default=0.0)

    @property
    def is_loading(self) -> bool:
        return bool(self._loads)

    def seconds(self, tokens: int) -> float:
        """How long a load of `tokens` would take if it were ordered now.

        No less than the oldest load in flight has taken so far: a tier that hangs, or that has
        just become slow, keeps only those waiting who came before that could be seen. A tier that
        was never measured is taken to need no time, so that somebody loads from it.
        """
        line = self._fitted.line
        if line is None:
            return self._oldest()
        alone = line.seconds(tokens) * self._doubt
        return max(self._ahead(line) + alone, self._overdue(line))

    def pace(self, tokens: int) -> LoadPace | None:
        """How soon the tier delivers blocks of `tokens`; None: not measured yet.

        Where the oldest load has taken longer than all in flight should, one after the
        other, the tier hangs or has become slow: then it is ready no sooner than that load took so
        far.
        """
        line = self._fitted.line
        if line is None:
            return None
        ready = self._overdue(line) or self._ahead(line)
        each = max(line.each * tokens, LEAST_SECONDS)
        return LoadPace(ready + line.fixed * self._doubt, each * self._doubt)

    @property
    def _beside(self) -> int:
        """Loads that run beside one that begins or ends now."""
        return min(len(self._loads), self._at_once - 1)

    def _ahead(self, line: LinearFit) -> float:
        """Seconds until the tier turns to a load that is ordered now: each before it costs its
        fixed time, and those that run are half done, in the mean."""
        running = [load.tokens for load in islice(self._loads.values(), self._at_once)]
        loads = len(self._loads) - len(running) / 2
        return loads * line.fixed + (self._queued - sum(running) / 2) * line.each

    def _overdue(self, line: LinearFit) -> float:
        """Seconds that the oldest load in flight has taken, where all of them, one after the other,
        should have taken less: ends are heard of a step late."""
        expected = len(self._loads) * line.fixed + self._queued * line.each
        oldest = self._oldest()
        return oldest if oldest > expected else 0.0

    @property
    def _doubt(self) -> int:
        return 1 << min(self.failures, MOST_DOUBT)

    def _oldest(self) -> float:
        """Seconds that the oldest load in flight has taken so far. Asked for each request that
        waits, in every step: loads are kept in the order in which they were ordered."""
        oldest = next(iter(self._loads.values()), None)
        return 0.0 if oldest is None else max(0.0, self._stepped - oldest.began)


KEEP = 0.7
"""Weight of all earlier samples when one comes in: the last three or so decide."""
REACH = 8.0
"""An outlier is clamped to this factor of the expected seconds."""


class Outliers:
    """Tells an outlier from what has changed: the second in a row that is out on the same side."""

    def __init__(self) -> None:
        self._side = 0

    def clamp(self, seconds: float, expected: float) -> tuple[float, bool]:
        """The seconds that count, and whether none of before does any more."""
        within = min(max(seconds, expected / REACH), expected * REACH)
        before, self._side = self._side, (seconds > within) - (seconds < within)
        has_changed = self._side == before != 0
        return seconds if has_changed else within, has_changed


class LinearFit(NamedTuple):
    """Seconds = `fixed` + amount x `each`; neither is negative."""

    fixed: float
    each: float

    def seconds(self, amount: float) -> float:
        return self.fixed + amount * self.each


class LoadLine:
    """A line through samples (amount, seconds); recent ones weigh most.

    The fit minimises the relative error (seconds per amount), since decisions compare ratios.
    Otherwise one large sample would outweigh many small ones that contradict it.
    """

    def __init__(self) -> None:
        self.line: LinearFit | None = None
        self._outliers = Outliers()
        self._sums = [0.0] * 5
        """Weighted, of 1, x, y, x^2 and xy."""

    def add(self, amount: float, seconds: float) -> None:
        """Take in a sample: `amount`, more than 0, took `seconds`."""
        expected = max(self.line.seconds(amount), 1e-9) if self.line is not None else seconds
        seconds, has_changed = self._outliers.clamp(seconds, expected)
        if has_changed:
            self._sums = [0.0] * 5
        x, y = 1 / amount, seconds / amount
        terms = (1.0, x, y, x * x, x * y)
        self._sums = [KEEP * before + term for before, term in zip(self._sums, terms, strict=True)]
        self.line = self._fit()

    def _fit(self) -> LinearFit:
        x, y, xx, xy = (of_all / self._sums[0] for of_all in self._sums[1:])
        spread = xx - x * x
        # Samples of nearly one size can't tell what is fixed.
        slope = (xy - x * y) / spread if spread > 0.1 * x * x else 0.0
        # Neither part may be negative at the mean.
        fixed = min(max(slope, 0.0), y / x)
        return LinearFit(fixed, max(0.0, y - fixed * x - ROUNDING * y))
