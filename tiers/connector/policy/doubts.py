"""Doubts: the paged blocks of which it is not known that what they hold is what it should be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from itertools import chain, dropwhile

from tiers.connector.policy.request_state import RequestState, RequestTable, Scheduled
from tiers.contract.protocols import NULL_BLOCK, Request


class Doubts:
    """Blocks that connectors of the engine load within a step, blocks with KV that another node
    sent of weights that are not known to be ours, and what is computed behind either.

    The engine finds these for other requests: the former from when it allocates them, and it hears
    after the step which of them failed. Those, and what is behind them, stay in doubt until they
    are loaded or computed anew. Used by the scheduler's thread alone.
    """

    def __init__(self, requests: RequestTable) -> None:
        self._requests = requests
        self._blocks: set[int] = set()
        """Those of loads within a step, of which these"""
        self._failed: set[int] = set()
        """are wrong, so that no step will say that they are right."""
        self._unheard: dict[int, list[list[int]]] = {}
        """By step, the tables of requests that it runs, each from its first block in doubt on."""
        self._sent: dict[int, set[str]] = {}
        """As `RequestState.sent`, of blocks."""

    def __bool__(self) -> bool:
        """Whether a step's end is to be heard."""
        return bool(self._blocks)

    def allocated(self, request_state: RequestState, first: int, in_step: bool) -> None:
        """The engine has given a request its blocks from `first` on anew; `in_step`: some are
        loaded within the step."""
        if in_step or self._is_concerned(request_state):
            new = set[int]().union(*(table[first:] for table in request_state.tables))
            self._blocks -= new
            self._failed -= new
            self._note_sent(request_state, set(), new)
            if in_step:
                self._blocks |= new

    def _is_concerned(self, request_state: RequestState) -> bool:
        is_sent = bool(request_state.sent) and not request_state.stores
        return is_sent or bool(self._blocks or self._sent)

    def step_begins(self, runs: Iterable[Scheduled], number: int | None) -> Iterator[Request]:
        """Those of its requests that compute behind blocks in doubt. `number`: of the step, if its
        end is heard, as of each that loads."""
        if self._blocks and number is not None:
            self._unheard[number] = []
        for run in runs:
            request_state = run.request_state
            if not self._is_concerned(request_state):
                continue
            written = set[int]()
            self._requests.groups.add_written(written, request_state.tables, run.before)
            tables = chain.from_iterable(request_state.tables)
            blocks = [block for block in tables if block != NULL_BLOCK]
            found = {*blocks} - written
            self._note_sent(request_state, found, written)
            if self._blocks.isdisjoint(found):
                self._blocks -= written
                self._failed -= written
                continue
            behind = [*dropwhile(lambda block: block not in self._blocks, blocks)]
            self._blocks.update(behind)
            for heard_then in [*self._unheard.values()][-1:]:
                heard_then.append(behind)
            if not self._unheard:
                self._failed.update(behind)
            yield request_state.request

    def _note_sent(self, request_state: RequestState, found: Set[int], written: Set[int]) -> None:
        for block in found & self._sent.keys():
            request_state.sent |= self._sent[block]
        others = self._requests.judge(request_state)
        for block in found | written:
            if others:
                self._sent[block] = others
            else:
                self._sent.pop(block, None)

    def heard(self, number: int, failed: Set[int]) -> None:
        """A step is over, and those before it; these blocks failed to load."""
        for step in [step for step in self._unheard if step <= number]:
            for blocks in self._unheard.pop(step):
                bad = dropwhile(lambda one: one not in failed and one not in self._failed, blocks)
                self._failed.update(bad)
        self._blocks = self._failed.union(*chain.from_iterable(self._unheard.values()))
