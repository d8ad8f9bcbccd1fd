"""Messages between the two halves of a chain that changes while its engine runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from spec.offloading import OffloadingSpec
from tiers.contract.messages import WorkerHandshake

Phase = Literal["prepare", "commit", "abort", "detach"]


@dataclass(frozen=True)
class ChangeOrder:
    """What a worker does about a change in one step.

    | phase | a worker |
    |---|---|
    | prepare | makes what the change needs, beside the steps; reports once: ready, or why not |
    | commit | puts that into place, before the step's orders |
    | abort | closes it |
    | detach | closes tiers that have nothing in flight, and reports once they are closed |

    `attach`: tiers that are opened, and `retune`: those that take other settings, by place.
    `closed`: the places of those that are closed.
    """

    number: int
    phase: Phase
    attach: Mapping[int, OffloadingSpec] = field(default_factory=dict)
    retune: Mapping[int, OffloadingSpec] = field(default_factory=dict)
    closed: tuple[int, ...] = ()


@dataclass
class ChangeReport:
    """What ranks have done of changes. `prepared`: by number and rank; empty: it is ready, else why
    it is not. `handshakes`: of the tiers that they opened for it, by place. `detached`: the ranks
    that have closed the tier of a place."""

    prepared: dict[int, dict[int, str]] = field(default_factory=dict)
    handshakes: dict[int, list[WorkerHandshake]] = field(default_factory=dict)
    detached: dict[int, set[int]] = field(default_factory=dict)

    def fold(self, other: ChangeReport) -> ChangeReport:
        """Add another rank's report to this one, which is returned."""
        for number, ranks in other.prepared.items():
            self.prepared.setdefault(number, {}).update(ranks)
        for place, shakes in other.handshakes.items():
            self.handshakes.setdefault(place, []).extend(shakes)
        for place, closed in other.detached.items():
            self.detached.setdefault(place, set()).update(closed)
        return self
