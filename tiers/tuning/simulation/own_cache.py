"""OwnCache: the engine's paged KV, in which prefixes stay in place until their blocks are taken."""

from __future__ import annotations

from tiers.tuning.simulation.prompt import Prompt
from tiers.tuning.simulation.spaces import LruSpace, Part, leading
from tiers.tuning.simulation.workload import Workload


class OwnCache:
    """The blocks of prompts under way, and, in the rest of its `capacity`, the prefixes used last.

    `capacity`: blocks; 0 for an engine without a prefix cache, which never lacks room.
    """

    def __init__(self, capacity: int, workload: Workload) -> None:
        self._capacity = capacity
        self._lengths = workload.lengths
        self._masks = workload.masks
        self._size = workload.block_tokens
        self._space = LruSpace(capacity)
        self._users: dict[int, int] = {}
        """How many prompts under way have each run in their path."""
        self._pins: dict[int, int] = {}
        self._space.pins = (self._pins,)
        self._reserved = 0
        """Blocks of prompts under way that are yet to be computed or loaded."""
        self._pinned = 0
        """Known blocks of such runs: they can't be taken."""

    def find(self, prompt: Prompt) -> tuple[int, int, int]:
        """Leading blocks of a prompt that are in place; of its path the run and the block in it
        that come next. The last token is always computed."""
        path, lengths, masks, get = prompt.path, self._lengths, self._masks, self._space.held.get
        known = at = skip = 0
        for run in path:
            have = get(run, 0)
            if have != masks[run]:
                skip = leading(have)
                known += skip
                break
            known += lengths[run]
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
        space, users, get = self._space, self._users, self._space.held.get
        unpinned = sum(get(run, 0).bit_count() for run in prompt.path if run not in users)
        needed = -(-prompt.tokens // self._size) - known
        taken = self._reserved + self._pinned
        if taken and taken + unpinned + needed > self._capacity:
            return False
        for run in prompt.path:
            users[run] = users.get(run, 0) + 1
            self._pins[run] = self._masks[run]
        self._pinned += unpinned
        prompt.reserved = needed
        self._reserved += needed
        space.touch(prompt.path)
        space.capacity = max(0, self._capacity - self._reserved)
        if space.used > space.capacity:
            space.shrink()
        return True

    def know(self, prompt: Prompt, blocks: int) -> None:
        """The first blocks of a prompt are computed or loaded: others find them in place."""
        if not self._capacity:
            return
        lengths, masks, space = self._lengths, self._masks, self._space
        held = space.held
        parts: list[Part] = []
        depth = fresh = 0
        for run in prompt.path:
            stop = depth + lengths[run]
            known = masks[run] if stop <= blocks else (1 << blocks - depth) - 1
            new = known & ~held.get(run, 0)
            if new:
                parts.append((run, new))
                fresh += new.bit_count()
            depth = stop
            if depth >= blocks:
                break
        self._pinned += fresh
        self._release(prompt, fresh)
        space.store(parts, prompt.path)

    def give_back(self, prompt: Prompt) -> None:
        """The prompt's request has ended."""
        if not self._capacity:
            return
        users, get = self._users, self._space.held.get
        for run in prompt.path:
            users[run] -= 1
            if not users[run]:
                del users[run], self._pins[run]
                self._pinned -= get(run, 0).bit_count()
        unknown = prompt.reserved
        self._release(prompt, unknown)
        # Of no use, such as a partial last block; taken again in their turn all the same.
        rest = [(-1 - prompt.number, (1 << unknown) - 1)] if unknown else []
        self._space.store(rest, prompt.path)

    def _release(self, prompt: Prompt, blocks: int) -> None:
        blocks = min(blocks, prompt.reserved)
        prompt.reserved -= blocks
        self._reserved -= blocks
        self._space.capacity = max(0, self._capacity - self._reserved)
