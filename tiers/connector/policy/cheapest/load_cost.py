"""LoadCost: how soon a tier would have loaded so much, from how long its loads took."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tiers.connector.policy.cheapest.linear_fit import LatencyModel, LinearFit

ABREAST = 2
"""Loads that a worker runs at once, for each tier."""


@dataclass
class _Load:
    tokens: int
    steps: int = 0
    began: float = math.inf


class LoadCost:
    """One tier's loads, in tokens: ranks and KV cache groups then need no counting apart.

    A sample is what the slowest rank's load took, from its own first byte to its last: neither its
    wait for other loads, which is estimated from what is under way, nor the engine's steps, which
    a long prefill of another request would else charge to the tier. Used by the scheduler's thread
    alone; `now` gives seconds, never going back.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._pace = LatencyModel()
        self._loads: dict[int, _Load] = {}
        self._stepped = -math.inf
        self.failures = 0
        """Loads in a row that did not bring all they should."""

    def began(self, job_id: int, tokens: int) -> None:
        """A load was ordered."""
        self._loads[job_id] = _Load(tokens)

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

    def ended(self, job_id: int, seconds: float, whole: bool) -> None:
        """A load has ended on all ranks; one that did not bring all it should is no sample."""
        load = self._loads.pop(job_id)
        self.failures = 0 if whole else self.failures + 1
        if whole and load.tokens:
            self._pace.add(load.tokens, seconds)

    @property
    def line(self) -> LinearFit | None:
        """Seconds by tokens of a load that nothing else delays; None: not measured yet."""
        return self._pace.line

    def gauges(self) -> dict[str, float]:
        """What is known of the tier's speed, as `GAUGES` name it."""
        line = self._pace.line
        if line is None or not line.each:
            return {}
        return {"load_latency_seconds": line.fixed, "load_tokens_per_second": 1 / line.each}

    @property
    def queued_tokens(self) -> int:
        """Tokens that are being loaded, or wait for it."""
        return sum(load.tokens for load in self._loads.values())

    @property
    def is_loading(self) -> bool:
        """Whether a load is under way."""
        return bool(self._loads)

    def seconds(self, tokens: int) -> float:
        """How long a load of so many tokens would take if it were ordered now.

        No less than the oldest load under way has taken so far: a tier that hangs, or that has
        just become slow, keeps only those waiting who came before that could be seen. A tier that
        was never measured is taken to need no time, so that somebody loads from it.
        """
        overdue, line = self._oldest(), self._pace.line
        if line is None:
            return overdue
        return max(self.queued_tokens / ABREAST * line.each + line.seconds(tokens), overdue)

    def wait(self, line: LinearFit) -> float:
        """How long a load that is ordered now waits for others, if the tier is as fast as `line`.

        Where the oldest has taken longer than all that is under way should, one after the other,
        the tier hangs or has become slow: then it is no less than that load has taken so far.
        """
        overdue, queued = self._oldest(), self.queued_tokens
        return overdue if overdue > line.seconds(queued) else queued / ABREAST * line.each

    def _oldest(self) -> float:
        """Seconds that the oldest load under way has taken so far."""
        began = min((load.began for load in self._loads.values()), default=math.inf)
        return max(0.0, self._stepped - began) if began < math.inf else 0.0
