"""Who waits for another's load? Of concurrent requests of one prefix all but one.

The second waits for the first one's load and then finds the prefix in the engine's cache. What
a request waits for is a load in flight, never a request that waits itself, and a load needs
nothing that a waiting request holds: it has its paged blocks. So nobody waits in a circle. The load
ends within the time that its request may wait, fails or is given up; and the wait is charged to
the waiting request, which continues alone when its time is over. Nor does anybody wait for a
load with other limits, or for requests that come, load and are aborted one after the other.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from tiers.connector.policy.request_state import LOOKUP_SECONDS, RequestState
from tiers.contract.block_groups import BlockGroups
from tiers.contract.engine_info import EngineInfo
from tiers.contract.protocols import Request

_Load = tuple[tuple[str, ...] | None, int | None, bytes]
"""What loads have in common that may be shared: the tiers and the tokens that their requests limit
themselves to, and the hash of the first block."""


class LoadSharing:
    """The loads in flight of a chain, and who waits for which; used by the scheduler's thread.

    `RequestState.loading` has the blocks that a request loads, by the engine's hashes, each of
    which covers all before it; `RequestState.awaits` the request whose load it waits for. Costs the
    same for each request, however many load or wait.
    """

    def __init__(self, engine: EngineInfo) -> None:
        self._size = engine.block_tokens
        self._step = engine.block_tokens // engine.hash_tokens
        self._windows = BlockGroups(engine).window > 0
        self._dropped = int(engine.drops_last)
        self._loaders: dict[_Load, RequestState] = {}

    def waits(self, request_state: RequestState) -> bool:
        """Whether the load that a request waits for is in flight."""
        if request_state.awaits is None:
            return False
        loader, budget = request_state.awaits.wait_budget, request_state.wait_budget
        if loader.is_loading and budget.left() > 0:
            return True
        request_state.awaits = None
        budget.loaded(math.inf if loader.is_loading else loader.ended)
        return False

    def joins(self, request_state: RequestState, computed: int, tokens: int) -> bool:
        """Whether a request that could load these tokens waits for another's load instead.

        It does where that brings at least half of them, and is not more than twice as long as what
        it brings: else waiting saves less than it costs. And where it has the same limits, and has
        no more time left.
        """
        request, start = request_state.request, computed // self._size
        # The engine computes a prompt's last token, whatever it has cached.
        stop = min(start + tokens // self._size, (request.num_tokens - 1) // self._size)
        if stop <= start:
            return False
        loader = self._loaders.get(_load(request_state, self._hash(request, start)))
        if loader is None or not loader.wait_budget.is_loading:
            return False
        # Else whoever comes anew and is aborted, again and again, would use up all of its time. Of
        # requests that came together some have looked up for longer than others.
        if loader.wait_budget.left() > request_state.wait_budget.left() + LOOKUP_SECONDS:
            return False
        shared = self._shared(request, range(start, stop), loader.loading)
        if 2 * shared < max(tokens // self._size, len(loader.loading)):
            return False
        # Whoever loads does not wait for another.
        self.ends(request_state)
        request_state.awaits = loader
        request_state.wait_budget.loads()
        return True

    def _shared(self, request: Request, blocks: range, hashes: Sequence[bytes]) -> int:
        """How many of these blocks the engine finds in its cache when those are loaded."""
        most = min(len(blocks), len(hashes))
        shared = bisect_left(
            range(most), True, key=lambda i: self._hash(request, blocks.start + i) != hashes[i]
        )
        if self._windows and (shared < len(hashes) or self._dropped):
            return 0  # what windows need is loaded at the end alone, and found there or nowhere
        return max(0, shared - self._dropped)

    def begins(self, request_state: RequestState, computed: int, tokens: int) -> None:
        blocks = range(computed // self._size, (computed + tokens) // self._size)
        self.ends(request_state)
        step, hashes = self._step, request_state.request.block_hashes
        request_state.loading = hashes[(blocks.start + 1) * step - 1 : blocks.stop * step : step]
        self._loaders[_load(request_state, request_state.loading[0])] = request_state

    def _hash(self, request: Request, block: int) -> bytes:
        return request.block_hashes[(block + 1) * self._step - 1]

    def ends(self, request_state: RequestState) -> None:
        """The request loads no more, or has finished."""
        load = _load(request_state, request_state.loading[0] if request_state.loading else b"")
        if self._loaders.get(load) is request_state:
            del self._loaders[load]
        request_state.loading, request_state.awaits = (), None


def _load(request_state: RequestState, first: bytes) -> _Load:
    return request_state.limits.tiers, request_state.limits.max_load_tokens, first
