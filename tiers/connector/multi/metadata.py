"""What the halves of a MultiConnector say to each other: an entry per child, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiers.contract.weight_reports import WeightOrders, WeightReport


@dataclass
class MultiConnectorMetadata:
    """One step's orders.

    `extra_async_saves`: requests that more than one child is saving, and how many more. `step`: the
    number under which the scheduler measures how long the step takes; None: it does not. `weights`:
    what it says of looks at them.
    """

    metadata: tuple[Any, ...]
    extra_async_saves: dict[str, int]
    step: int | None = None
    weights: WeightOrders = WeightOrders()  # noqa: RUF009 - it is a constant


@dataclass
class MultiWorkerMetadata:
    """What the children of one worker finished, the number of the step that is over, and what was
    seen of the weights."""

    metadata: tuple[Any, ...]
    step: int | None = None
    weights: WeightReport | None = None

    def aggregate(self, other: MultiWorkerMetadata) -> MultiWorkerMetadata:
        """Both ranks' metadata, child by child."""
        pairs = zip(self.metadata, other.metadata, strict=True)
        return MultiWorkerMetadata(
            tuple(
                a.aggregate(b) if a is not None and b is not None else a if b is None else b
                for a, b in pairs
            ),
            self.step,
            self.weights.fold(other.weights) if self.weights is not None else other.weights,
        )


@dataclass(frozen=True)
class MultiHandshakeMetadata:
    """What the children of one worker say of themselves.

    `chain` names what they agree on: an engine's own MultiConnector gives the words of its first
    child to all of them, so whoever does not agree must not listen.
    """

    metadata: tuple[Any, ...]
    chain: str = ""
