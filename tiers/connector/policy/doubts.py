"""Doubts: the paged blocks that may hold what failed to load within a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from itertools import chain, dropwhile

from tiers.connector.policy.request_state import RequestState, Scheduled
from tiers.contract.block_groups import BlockGroups
from tiers.contract.protocols import NULL_BLOCK, Request


class Doubts:
    """Blocks that connectors of the engine load within a step, and what is computed behind them.

    The engine finds these for other requests from when it allocates them, and hears after the step
    which of them failed. Those, and what is behind them, stay in doubt until they are loaded or
    computed anew. Used by the scheduler's thread alone.
    """

    def __init__(self, groups: BlockGroups) -> None:
        self._groups = groups
        self._blocks: set[int] = set()
        self._failed: set[int] = set()
        """Those of the blocks of which no step will say that they are right."""
        self._unheard: dict[int, list[list[int]]] = {}
        """By step, the tables of requests that it runs, each from its first block in doubt on."""

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def allocated(self, request_state: RequestState, first: int, in_step: bool) -> None:
        """The engine has given a request its blocks from `first` on anew; `in_step`: some are
        loaded within the step."""
        if in_step or self._blocks:
            new = set[int]().union(*(table[first:] for table in request_state.tables))
            self._failed -= new
            self._blocks = self._blocks | new - {NULL_BLOCK} if in_step else self._blocks - new

    def step_begins(self, runs: Iterable[Scheduled], number: int | None) -> Iterator[Request]:
        """Those of its requests that compute behind blocks in doubt. `number`: of the step, if its
        end is heard, as of each that loads."""
        if self._blocks and number is not None:
            self._unheard[number] = []
        for run in runs if self._blocks else ():
            written = set[int]()
            self._groups.add_written(written, run.request_state.tables, run.before)
            blocks = [*chain.from_iterable(run.request_state.tables)]
            if self._blocks.isdisjoint({*blocks} - written):
                self._blocks -= written
                self._failed -= written
                continue
            behind = [*dropwhile(lambda block: block not in self._blocks, blocks)]
            self._blocks.update(behind)
            for tables in [*self._unheard.values()][-1:]:
                tables.append(behind)
            if not self._unheard:
                self._failed.update(behind)
            yield run.request_state.request

    def heard(self, number: int, failed: Set[int]) -> None:
        """A step is over, and those before it; these blocks failed to load."""
        for step in [step for step in self._unheard if step <= number]:
            for blocks in self._unheard.pop(step):
                bad = dropwhile(lambda one: one not in failed and one not in self._failed, blocks)
                self._failed.update(bad)
        self._blocks = self._failed.union(*chain.from_iterable(self._unheard.values()))
