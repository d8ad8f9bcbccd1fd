"""OwnCache: the engine's paged KV, in which prefixes stay in place until their blocks are taken."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from tiers.tuning.simulation.prompt import Prompt
from tiers.tuning.simulation.spaces import Part
from tiers.tuning.simulation.workload import Workload


class OwnCache:
    """The blocks of prompts under way, and, in the rest of its `capacity`, the prefixes used last.

    A prompt's blocks become known from the first on and go from the last on, so that what is known
    of a run is a count. Runs of prompts under way can't be taken: only the others have an order.

    `capacity`: blocks; 0 for an engine without a prefix cache, which never lacks room.
    """

    def __init__(self, capacity: int, workload: Workload) -> None:
        self._capacity = capacity
        self._lengths = workload.lengths
        self._size = workload.block_tokens
        runs = len(workload.lengths)
        self._known = [0] * runs
        """Leading blocks of each run that are in place."""
        self._users = [0] * runs
        """How many prompts under way have each run in their path."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Runs with known blocks that no prompt under way has, the first to go first."""
        self._free = capacity
        """Blocks that are neither used nor taken; less than 0 where all others are pinned."""
        self._taken = 0
        """Blocks of prompts under way: known, or yet to be computed or loaded."""

    def find(self, prompt: Prompt) -> tuple[int, int, int]:
        """Leading blocks of a prompt that are in place; of its path the run and the block in it
        that come next. The last token is always computed."""
        path, lengths, in_place = prompt.path, self._lengths, self._known
        known = at = skip = 0
        for run in path:
            have = in_place[run]
            known += have
            if have != lengths[run]:
                skip = have
                break
            at += 1
        limit = (prompt.tokens - 1) // self._size
        if known <= limit:
            return known, at, skip
        at, skip = 0, limit
        while skip >= lengths[path[at]]:
            skip -= lengths[path[at]]
            at += 1
        return limit, at, skip

    def reserve(self, prompt: Prompt, known: int) -> bool:
        """Take blocks for what a prompt has not found in place; False: too few are free."""
        if not self._capacity:
            return True
        users, in_place, path = self._users, self._known, prompt.path
        more = needed = -(-prompt.tokens // self._size) - known
        idle: list[int] = []
        for run in path:
            if in_place[run] and not users[run]:
                more += in_place[run]
                idle.append(run)
        if self._taken and self._taken + more > self._capacity:
            return False
        for run in idle:
            del self._idle[run]
        for run in path:
            users[run] += 1
        prompt.reserved = needed
        self._taken += more
        self._free -= needed
        if self._free < 0:
            self._take_idle()
        return True

    def know(self, prompt: Prompt, parts: Iterable[Part]) -> None:
        """These blocks of a prompt are computed or loaded, as all before them: others find them in
        place."""
        if not self._capacity:
            return
        in_place = self._known
        unknown = prompt.reserved
        for run, blocks in parts:
            end = blocks.bit_length()
            have = in_place[run]
            if end > have:
                in_place[run] = end
                unknown -= end - have
        if unknown < 0:
            self._taken -= unknown
            self._free += unknown
            unknown = 0
            if self._free < 0:
                self._take_idle()
        prompt.reserved = unknown

    def answer(self, prompt: Prompt, path: Sequence[int]) -> None:
        """The answer of a prompt has filled the runs that `path` adds to the prompt's own; their
        blocks are yet to be known."""
        if not self._capacity:
            return
        users, in_place = self._users, self._known
        for run in path:
            if not users[run] and in_place[run]:
                self._taken += in_place[run]
                del self._idle[run]
            users[run] += 1
        # The KV of the last token is not computed.
        needed = -(-(prompt.tokens + prompt.answer - 1) // self._size) - prompt.blocks
        more = max(0, needed - prompt.reserved)
        prompt.reserved += more
        self._taken += more
        self._free -= more
        if self._free < 0:
            self._take_idle()

    def give_back(self, prompt: Prompt) -> None:
        """The prompt's request has ended."""
        if not self._capacity:
            return
        users, in_place, idle = self._users, self._known, self._idle
        # What it never knew is of no use, such as a partial last block: taken again first.
        self._free += prompt.reserved
        ended = prompt.reserved
        prompt.reserved = 0
        for run in prompt.path[::-1]:
            users[run] = left = users[run] - 1
            if not left and (have := in_place[run]):
                idle[run] = None
                ended += have
        self._taken -= ended
        if self._free < 0:
            self._take_idle()

    def _take_idle(self) -> None:
        """Take blocks of idle runs, from the tail, for those that there is no room for."""
        free, idle, in_place = self._free, self._idle, self._known
        while free < 0 and idle:
            run = next(iter(idle))
            free += in_place[run]
            if free > 0:
                in_place[run] = free
                free = 0
            else:
                in_place[run] = 0
                del idle[run]
        self._free = free
