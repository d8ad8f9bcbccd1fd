"""What a load policy asks of a connector that shares loads, and the one load that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Protocol, runtime_checkable

from tiers.connector.policy.request_state import RequestState
from tiers.explain.notes import UNNOTED, Attempt, Explained
from tiers.loading.load_cost import LoadCost


@runtime_checkable
class BlockLoader(Explained, Protocol):
    """Capability, scheduler role: a connector that can load any blocks of a request, where the
    contract knows only leading prefixes. How long its loads take is measured, so that plans can be
    compared with computing.
    """

    @property
    def load_cost(self) -> LoadCost:
        """What is known of its loads."""

    def count(self, **measures: float) -> None:
        """Add to its stats what the policy counts and measures."""

    def coverage(self, request_state: RequestState, blocks: range) -> Sequence[int] | None:
        """How much of each of these blocks of the request could be loaded.

        As `contract.block_groups` says; None: ask again later.
        """

    def version(self, request_state: RequestState) -> int | None:
        """`coverage` of a request is the same while this is; None: it is not known."""

    def load_blocks(
        self, request_state: RequestState, ranges: Sequence[range], shared: SharedLoad
    ) -> None:
        """As `update_state_after_alloc`, and load these ranges of blocks, which it holds."""

    def missed(self, steps: Set[int]) -> None:
        """No worker had these steps: order their loads again, and end all else they ordered."""


class SharedLoad:
    """The part of a load that the engine can use: blocks before the first that failed in any tier.

    That is known when the last tier has ended. Used by the scheduler's thread alone.
    """

    def __init__(
        self, tiers: int, notes: Attempt = UNNOTED, began: float = 0.0, all_or_nothing: bool = False
    ) -> None:
        """`notes`: hear of its outcome. `began`: when, by the clock of the tiers.
        `all_or_nothing`: a part of it, which might end within a medium, is of no use."""
        self.began, self.all_or_nothing = began, all_or_nothing
        self.notes = notes
        self._left = tiers
        self._failed: list[int] = []
        self._parts: list[tuple[Sequence[int], Callable[[int], None]]] = []

    @property
    def has_ended(self) -> bool:
        """Whether all tiers' parts have, each on all ranks."""
        return self._left <= 0

    def end(
        self, blocks: Sequence[int], failed: Iterable[int], count: Callable[[int], None]
    ) -> int | None:
        """One tier has ended its `blocks`; `count` is called, once, with those of use. If it was
        the last, how many of all tiers' blocks are of use."""
        self._parts.append((blocks, count))
        self._failed += failed
        self._left -= 1
        if not self.has_ended:
            return None
        of_use = 0
        first = min(self._failed, default=None)
        for part, count_usable in self._parts:
            usable = len(part) if first is None else sum(block < first for block in part)
            count_usable(usable)
            of_use += usable
            self.notes.part_usable(part[0], usable)
        return of_use
