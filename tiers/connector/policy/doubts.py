"""Doubts: the paged blocks of which it is not known that what they hold is what it should be."""

from __future__ import annotations

from collections.abc import Iterable, Set
from itertools import chain, dropwhile

from tiers.connector.policy.request_state import EngineStep, RequestState, Scheduled
from tiers.connector.policy.request_table import RequestTable
from tiers.contract.protocols import NULL_BLOCK


class Doubts:
    """Blocks that connectors of the engine load within a step, blocks with KV that another node
    sent of weights that are not known to be ours, blocks whose hashes may be of other tokens, and
    what is computed behind any.

    The engine finds these for other requests: the first from when it allocates them, and it hears
    after the step which of them failed. Those, the last, and what is behind them, stay in doubt
    until they are given to a request anew: who computes them again may end before, or do so in
    parts. Used by the scheduler's thread alone.
    """

    def __init__(self, requests: RequestTable) -> None:
        self._requests = requests
        self._blocks: set[int] = set()
        """Those of loads within a step, and behind them, of steps whose end will say it."""
        self._failed: set[int] = set()
        """Those of which no step will say that they are right."""
        self._unheard: dict[int, list[list[int]]] = {}
        """By step, the tables of requests that it runs, each from its first block in doubt on."""
        self._sent: dict[int, set[str]] = {}
        """As `RequestState.sent`, of blocks."""

    def __bool__(self) -> bool:
        """Whether a step's end is to be heard."""
        return bool(self._blocks or self._failed or self._unheard)

    def allocated(self, request_state: RequestState, computed: int, in_step: bool) -> None:
        """The engine has given a request its blocks anew, but for those of `computed` tokens, which
        it found; `in_step`: some are loaded within the step."""
        if in_step or request_state.sent or self or self._sent:
            new = self._behind(request_state, computed)
            self._are_right(new)
            self.judge(request_state, computed)
            if in_step:
                self._blocks |= new

    def judge(self, request_state: RequestState, computed: int) -> set[str]:
        """Whose weights a request's KV is of, beside its own; so is what it has behind its first
        `computed` tokens."""
        if others := self._requests.weights.judge(request_state):
            self._sent.update(dict.fromkeys(self._behind(request_state, computed), others))
        return others

    def _behind(self, request_state: RequestState, computed: int) -> set[int]:
        behind = set[int]()
        self._requests.groups.add_written(behind, request_state.tables, computed)
        return behind - {NULL_BLOCK}

    def step_begins(self, step: EngineStep, number: int | None) -> list[RequestState]:
        """Those of its requests that compute behind blocks in doubt. `number`: of the step, if its
        end is heard, as of each that loads."""
        if self and number is not None:
            self._unheard[number] = []
        found, runs = list[RequestState](), step.scheduled
        unsure = set[int]()
        for run in runs:
            if sure := run.request_state.sure:  # what comes before this step may be others' by now
                unsure |= self._behind(run.request_state, max(sure, run.before))
        if not (self or self._sent or unsure or any(run.request_state.sent for run in runs)):
            for run in runs:
                run.request_state.in_doubt = False
            return found
        self._are_right(step.added)
        self._failed |= unsure
        for copy in step.copies:
            self._copied(copy.src_block_id, copy.dst_block_id)
        # Twice: one may find what another, that comes later here, computes in this very step.
        for run in [run for run in runs if run.request_state.in_doubt] * 2:
            if self._is_doubtful(run) and run.request_state not in found:
                found.append(run.request_state)
        return found

    def _is_doubtful(self, run: Scheduled) -> bool:
        """Whether a request computes behind blocks in doubt, as then all is that it writes; of what
        was sent the request itself knows."""
        request_state = run.request_state
        tables = chain.from_iterable(request_state.tables)
        blocks = [block for block in tables if block != NULL_BLOCK]
        for block in self._sent.keys() & blocks:
            request_state.sent |= self._sent[block]
        if not (others := self.judge(request_state, run.before)):
            self._are_ours(blocks)
        behind = [*dropwhile(self._is_right, blocks)]
        # Whoever begins with nothing in doubt goes on so: what it is given later it writes itself.
        request_state.in_doubt = bool(others or behind)
        self._doubt(behind)
        return bool(behind)

    def _doubt(self, blocks: list[int]) -> None:
        """If one is wrong, so are those that follow it, which the end of the last step in flight
        will say; of steps that nobody hears of, or where one is wrong already, all are taken to
        be."""
        if self._unheard and self._failed.isdisjoint(blocks):
            self._blocks.update(blocks)
            self._unheard[max(self._unheard)].append(blocks)
        else:
            self._failed.update(blocks)

    def _is_right(self, block: int) -> bool:
        return block not in self._blocks and block not in self._failed

    def _copied(self, source: int, to: int) -> None:
        """A request has a copy of a block of which it found a part."""
        if source in self._sent:
            self._sent[to] = self._sent[source]
        if not self._is_right(source):
            self._doubt([source, to])

    def _are_right(self, blocks: set[int]) -> None:
        self._blocks -= blocks
        self._failed -= blocks
        self._are_ours(blocks)

    def _are_ours(self, blocks: Iterable[int]) -> None:
        for block in self._sent.keys() & blocks:
            del self._sent[block]

    def heard(self, number: int, failed: Set[int]) -> None:
        """A step is over, and those before it; these blocks failed to load."""
        for step in [step for step in self._unheard if step <= number]:
            for blocks in self._unheard.pop(step):
                bad = dropwhile(lambda one: one not in failed and one not in self._failed, blocks)
                self._failed.update(bad)
        self._blocks = set[int]().union(*chain.from_iterable(self._unheard.values()))
