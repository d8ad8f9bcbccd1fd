"""Sharing: concurrent requests of one prefix load it once.

The second waits for the first one's load and then finds the prefix in the engine's own cache. What
a request waits for is a load under way, never a request that waits itself, and a load needs
nothing that a waiting request holds: it has its paged blocks. So nobody waits in a circle. The load
ends within the time that its request may wait, fails or is given up; and the wait is charged to
the waiting request, which goes on by itself when its own time is over.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from tiers.connector.contract.block_groups import BlockGroups
from tiers.connector.contract.engine import EngineInfo
from tiers.connector.contract.protocols import Request
from tiers.connector.policy.wait_budget import WaitBudget


class _Load(NamedTuple):
    """Blocks that a request loads, by the engine's hashes, each of which says all before it."""

    request_id: str
    hashes: Sequence[bytes]


class LoadSharing:
    """The loads under way of a chain, and who waits for which; used by the scheduler's thread.

    Costs the same for each request, however many load or wait.
    """

    def __init__(self, engine: EngineInfo, wait_budget: WaitBudget) -> None:
        """`wait_budget`: the chain's, which is told of the end of each load."""
        self._size = engine.block_tokens
        self._step = engine.block_tokens // engine.hash_tokens
        self._windows = BlockGroups(engine).window > 0
        self._dropped = int(engine.drops_last)
        self._wait_budget = wait_budget
        self._loads: dict[bytes, _Load] = {}
        self._first: dict[str, bytes] = {}
        self._awaited: dict[str, str] = {}

    def waits(self, request_id: str) -> bool:
        """Whether the load that a request waits for is under way."""
        loader = self._awaited.get(request_id)
        if loader is None:
            return False
        if self._wait_budget.loads_now(loader) and self._wait_budget.left(request_id) > 0:
            return True
        del self._awaited[request_id]
        self._wait_budget.loaded(request_id)
        return False

    def joins(self, request: Request, computed: int, tokens: int) -> bool:
        """Whether a request that could load these tokens waits for another's load instead.

        It does where that brings at least half of them, and is not more than twice as long as what
        it brings: else waiting saves less than it costs.
        """
        start = computed // self._size
        # The engine computes a prompt's last token, whatever it has cached.
        stop = min(start + tokens // self._size, (request.num_tokens - 1) // self._size)
        if stop <= start:
            return False
        load = self._loads.get(self._hash(request, start))
        if load is None or not self._wait_budget.loads_now(load.request_id):
            return False
        shared = self._shared(request, range(start, stop), load.hashes)
        if not shared or 2 * shared < max(tokens // self._size, len(load.hashes)):
            return False
        # Whoever is said to load here does, and does not wait for another.
        self._ends(request.request_id)
        self._awaited[request.request_id] = load.request_id
        self._wait_budget.loads(request.request_id)
        return True

    def loader_of(self, request_id: str) -> str:
        """Whose load a request that joined one waits for."""
        return self._awaited[request_id]

    def _shared(self, request: Request, blocks: range, hashes: Sequence[bytes]) -> int:
        """How many of these blocks the engine finds in its cache when those are loaded."""
        most = min(len(blocks), len(hashes))
        shared = bisect_left(
            range(most),
            True,
            key=lambda i: self._hash(request, blocks.start + i) != hashes[i],
        )
        if self._windows and (shared < len(hashes) or self._dropped):
            return 0  # what windows need is loaded at the end alone, and found there or nowhere
        return max(0, shared - self._dropped)

    def begins(self, request: Request, computed: int, tokens: int) -> None:
        """A request loads these tokens."""
        blocks = range(computed // self._size, (computed + tokens) // self._size)
        self._ends(request.request_id)
        step = self._step
        hashes = request.block_hashes[(blocks.start + 1) * step - 1 : blocks.stop * step : step]
        self._first[request.request_id] = hashes[0]
        self._loads[hashes[0]] = _Load(request.request_id, hashes)

    def _hash(self, request: Request, block: int) -> bytes:
        return request.block_hashes[(block + 1) * self._step - 1]

    def _ends(self, request_id: str) -> None:
        first = self._first.pop(request_id, None)
        load = None if first is None else self._loads.get(first)
        if first is not None and load is not None and load.request_id == request_id:
            del self._loads[first]

    def forget(self, request_id: str) -> None:
        """The request has finished."""
        self._ends(request_id)
        self._awaited.pop(request_id, None)
