"""Weights: what a worker sees of the model's weights, which may change without a word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from tiers.contract.marks import AdapterReports


class Look(Protocol):
    """A look in flight."""

    def ready(self) -> bool:
        """Whether `seen` waits for nothing any more."""

    def seen(self) -> bytes:
        """Bytes that are equal while the weights are. Any thread may ask; waits for the device.
        Raises RuntimeError, of a device that failed."""


class Weights(Protocol):
    """A sample of one rank's weights, and a count of what is known to have changed them.

    `parts`: how many different samples there are, which are looked at in turn.
    """

    @property
    def parts(self) -> int: ...

    def look(self, part: int) -> Look:
        """Begin to look at a part, behind all that the engine queued on its device so far. Called
        by the engine's thread; waits for nothing."""


class Unseen:
    """Weights that can't be looked at, and are taken for unchanged."""

    parts = 1

    def look(self, part: int) -> Unseen:
        return self

    def ready(self) -> bool:
        return True

    def seen(self) -> bytes:
        return b""


class Seen(NamedTuple):
    """What so many ranks saw in a step that stores: whether the weights of all are as they were."""

    ranks: int
    unchanged: bool

    def fold(self, other: Seen | None) -> Seen:
        """What these and other ranks saw."""
        return (
            self
            if other is None
            else Seen(self.ranks + other.ranks, self.unchanged and other.unchanged)
        )


class WeightReport(NamedTuple):
    """What ranks saw since the last step. `over`: a generation whose weights are others now.
    `seen`: by the numbers of looks; where there is one rank nobody asks. `adapters`: those that
    were loaded."""

    over: bytes | None
    seen: Mapping[int, Seen]
    adapters: AdapterReports = {}  # noqa: RUF012 - it is a constant

    def fold(self, other: WeightReport | None) -> WeightReport:
        """What these and other ranks saw."""
        if other is None:
            return self
        seen = {number: one.fold(other.seen.get(number)) for number, one in self.seen.items()}
        adapters = {**other.adapters, **self.adapters}
        return WeightReport(self.over or other.over, {**other.seen, **seen}, adapters)


class WeightOrders(NamedTuple):
    """What a step says of looks. `number`: of the step's look, if it stores. `verdicts`: what all
    ranks together saw by earlier ones."""

    number: int | None = None
    verdicts: Mapping[int, bool] = {}


class Watch(Protocol):
    """Looks at a worker's weights, for all tiers of a chain."""

    def bind(self, orders: WeightOrders) -> None:
        """Take the orders of the step that begins."""

    def report(self) -> WeightReport | None:
        """What was seen since the last call; None: nothing that is not known."""


class NoWatch:
    """For connectors that keep no blocks of their own."""

    def bind(self, orders: WeightOrders) -> None:
        pass

    def report(self) -> None:
        return None
