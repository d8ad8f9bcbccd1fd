"""Weights: what a worker sees of the model's weights, which may change unannounced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from tiers.contract.marks import AdapterReports


class Look:
    """A look in flight. This one has ended, and shows the same whatever the weights are."""

    def ready(self) -> bool:
        """Whether `seen` waits for nothing any more."""
        return True

    def seen(self) -> bytes:
        """Bytes that are equal while the weights are. Any thread may ask; waits for the device.
        Raises RuntimeError, of a device that failed."""
        return b""


class Weights:
    """A sample of one rank's weights, and a count of what is known to have changed them. These
    defaults: weights that can't be looked at, and are taken for unchanged.

    `parts`: how many different samples there are, which are looked at in turn.
    """

    parts = 1

    def look(self, part: int) -> Look:
        """Begin to look at a part, behind all that the engine queued on its device so far. Called
        by the engine's thread; waits for nothing."""
        return Look()


class Seen(NamedTuple):
    """What `ranks` ranks saw in a step that stores: whether the weights of all are unchanged."""

    ranks: int
    unchanged: bool

    def fold(self, other: Seen | None) -> Seen:
        if other is None:
            return self
        return Seen(self.ranks + other.ranks, self.unchanged and other.unchanged)


class WeightReport(NamedTuple):
    """What ranks saw since the last step. `over`: a generation whose weights have changed, or whose
    KV is gone. `seen`: by the numbers of looks; empty where there is one rank. `adapters`: those
    that were loaded. `missed`: on how many of the ranks a step never came."""

    over: bytes | None
    seen: Mapping[int, Seen]
    adapters: AdapterReports = {}  # noqa: RUF012 - it is a constant
    missed: Mapping[int, int] = {}

    def fold(self, other: WeightReport) -> WeightReport:
        seen = {number: seen.fold(other.seen.get(number)) for number, seen in self.seen.items()}
        adapters = {**other.adapters, **self.adapters}
        missed = Counter(self.missed) + Counter(other.missed)
        return WeightReport(self.over or other.over, {**other.seen, **seen}, adapters, missed)


class WeightOrders(NamedTuple):
    """A step's orders. `step`: its number, from 0 on; None: nobody counts. `number`: the same as
    that of its look, if it stores. `verdicts`: whether all ranks together saw unchanged weights, by
    the numbers of earlier looks. `tag`: of the generation of what it computes; None: nothing.
    `is_first`: whether the engine's own cache was empty before it."""

    number: int | None = None
    verdicts: Mapping[int, bool] = {}
    tag: bytes | None = None
    step: int | None = None
    is_first: bool = False


class Watch:
    """Looks at a worker's weights, and whether its steps end well, for all tiers of a chain; by
    default there is nothing to see."""

    def bind(self, orders: WeightOrders) -> None:
        """Take the orders of the step that begins."""

    def computed(self) -> None:
        """The step has computed all that it was to."""

    def kv_gone(self) -> None:
        """The memory of the paged KV is taken away. Any thread may say so."""

    @property
    def may_store(self) -> bool:
        """Whether what the step has computed may be stored."""
        return True

    stopped = ""
    """Why nothing is stored any more; empty: it is."""

    def report(self) -> WeightReport | None:
        """Report what was seen since the last call; None: nothing new."""
        return None
