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
        self._reserved = 0

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
        capacity = self._capacity
        if not capacity:
            return True
        needed = -(-prompt.tokens // self._size) - known
        reserved = self._reserved
        if reserved and reserved + needed > capacity:
            return False
        prompt.reserved = needed
        self._reserved = reserved = reserved + needed
        space = self._space
        if known:
            space.touch(prompt.path)
        space.capacity = capacity - reserved if capacity > reserved else 0
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
        self._release(prompt, fresh)
        space.store(parts, prompt.path)

    def give_back(self, prompt: Prompt) -> None:
        """The prompt's request has ended."""
        if self._capacity:
            self._release(prompt, prompt.reserved)
            self._space.touch(prompt.path)

    def _release(self, prompt: Prompt, blocks: int) -> None:
        blocks = min(blocks, prompt.reserved)
        prompt.reserved -= blocks
        self._reserved -= blocks
        self._space.capacity = max(0, self._capacity - self._reserved)
