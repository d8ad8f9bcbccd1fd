"""Doubts: the paged blocks of which it is not known that what they hold is what it should be."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import chain, dropwhile

from tiers.connector.policy.request_state import RequestState, RequestTable, Scheduled
from tiers.contract.protocols import NULL_BLOCK


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
        if in_step or request_state.sent or self._blocks or self._sent:
            new = set[int]().union(*(table[first:] for table in request_state.tables))
            new.discard(NULL_BLOCK)
            self._are_right(new)
            self._mark_sent(new, self._requests.judge(request_state))
            if in_step:
                self._blocks |= new

    def step_begins(self, runs: Sequence[Scheduled], number: int | None) -> list[RequestState]:
        """Those of its requests that compute behind blocks in doubt. `number`: of the step, if its
        end is heard, as of each that loads."""
        if self._blocks and number is not None:
            self._unheard[number] = []
        looked_at, found = list[tuple[RequestState, set[int]]](), list[RequestState]()
        if not (self._blocks or self._sent or any(run.request_state.sent for run in runs)):
            for run in runs:
                run.request_state.in_doubt = False
            return found
        for run in runs:
            request_state, written = run.request_state, set[int]()
            self._requests.groups.add_written(written, request_state.tables, run.before)
            if request_state.in_doubt:
                looked_at.append((request_state, written))
            else:
                self._are_right(written)
        # Twice: one may find what another, that comes later here, computes in this very step.
        for request_state, written in looked_at * 2:
            if self._is_doubtful(request_state, written) and request_state not in found:
                found.append(request_state)
        return found

    def _is_doubtful(self, request_state: RequestState, written: set[int]) -> bool:
        """Whether a request computes what it writes behind blocks in doubt, which that is then; of
        what was sent the request itself knows."""
        blocks = [one for one in chain.from_iterable(request_state.tables) if one != NULL_BLOCK]
        found = {*blocks} - written
        for block in found & self._sent.keys():
            request_state.sent |= self._sent[block]
        others = self._requests.judge(request_state)
        self._mark_sent(written if others else found | written, others)
        is_behind = not self._blocks.isdisjoint(found)
        # Whoever begins with nothing in doubt goes on so: what it is given later it writes itself.
        request_state.in_doubt = bool(others) or is_behind
        if not is_behind:
            self._blocks -= written
            self._failed -= written
            return False
        behind = [*dropwhile(lambda block: block not in self._blocks, blocks)]
        self._blocks.update(behind)
        for heard_then in [*self._unheard.values()][-1:]:
            heard_then.append(behind)
        if not self._unheard:
            self._failed.update(behind)
        return True

    def _are_right(self, blocks: set[int]) -> None:
        self._blocks -= blocks
        self._failed -= blocks
        self._mark_sent(blocks, set())

    def _mark_sent(self, blocks: set[int], others: set[str]) -> None:
        for block in blocks if others else blocks & self._sent.keys():
            if others:
                self._sent[block] = others
            else:
                del self._sent[block]

    def heard(self, number: int, failed: Set[int]) -> None:
        """A step is over, and those before it; these blocks failed to load."""
        for step in [step for step in self._unheard if step <= number]:
            for blocks in self._unheard.pop(step):
                bad = dropwhile(lambda one: one not in failed and one not in self._failed, blocks)
                self._failed.update(bad)
        self._blocks = self._failed.union(*chain.from_iterable(self._unheard.values()))
