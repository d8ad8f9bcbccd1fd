"""What the scheduler half of a tier knows of each request: its keys, its blocks, what was tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tiers.connector.base import EngineInfo, Request, SchedulerOutput
from tiers.connector.generation import Generation
from tiers.connector.limits import read_limits

GROUP = (0).to_bytes(2, "little")
"""KV cache group in a key; models with one group only, so far."""


@dataclass
class RequestState:
    """What the scheduler half knows of a request.

    `keys`: of the full blocks known so far. `block_ids`: its blocks in the paged KV.
    `match`: (first block, blocks) of the last lookup. `offered`: leading blocks that need not be
    offered for storing again. `recompute`: this tier failed to load it and is not asked again, so
    a request is loaded in vain once per tier at most. `store`: whether its blocks are stored.
    """

    request: Request
    keys: list[bytes] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    match: tuple[int, int] = (0, 0)
    offered: int = 0
    recompute: bool = False
    store: bool = True


class RequestTable:
    """The unfinished requests; used by the scheduler's thread alone."""

    def __init__(self, engine: EngineInfo, generation: Generation, promote: bool) -> None:
        self._engine = engine
        self._generation = generation
        self._promote = promote
        self._states: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def get(self, request_id: str) -> RequestState | None:
        """The state of a request that is known."""
        return self._states.get(request_id)

    def state_of(self, request: Request) -> RequestState:
        """The state of a request, with the keys of all blocks that are full by now."""
        state = self._states.get(request.request_id)
        if state is None:
            store = read_limits(request)[0].store
            state = self._states[request.request_id] = RequestState(request, store=store)
        ratio = self._engine.block_tokens // self._engine.hash_tokens
        hashes = request.block_hashes
        for block in range(len(state.keys), len(hashes) // ratio):
            state.keys.append(self._generation.key(bytes(hashes[(block + 1) * ratio - 1]) + GROUP))
        return state

    def forget(self, request_id: str) -> None:
        """Drop a request that has finished."""
        self._states.pop(request_id, None)

    def reset(self) -> None:
        """Keep what is stored in a new generation free of what was computed in an older one.

        A request that has blocks has computed some of them with what is reset, so that none of
        its blocks may be stored. The others begin anew.
        """
        self._states = {i: state for i, state in self._states.items() if state.block_ids}
        for state in self._states.values():
            state.store, state.recompute = False, True

    def scheduled(
        self, output: SchedulerOutput, overwritten: set[int]
    ) -> Iterator[tuple[RequestState, int]]:
        """Each request a step runs, with its tokens computed when the step is over.

        Blocks that the step writes are added to `overwritten`.
        """
        for new in output.scheduled_new_reqs:
            state = self._states.get(new.req_id)
            if state is None:
                continue
            state.block_ids = list(new.block_ids[0])
            overwritten.update(self._written(state, new.num_computed_tokens))
            if not self._promote:
                state.offered = new.num_computed_tokens // self._engine.block_tokens
            yield state, new.num_computed_tokens + output.num_scheduled_tokens[new.req_id]
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            state = self._states.get(request_id)
            if state is None:
                continue
            blocks = cached.new_block_ids[i]
            added = list(blocks[0]) if blocks is not None else []
            resumed = request_id in cached.resumed_req_ids
            state.block_ids = added if resumed else state.block_ids + added
            computed = cached.num_computed_tokens[i]
            overwritten.update(self._written(state, computed))
            yield state, computed + output.num_scheduled_tokens.get(request_id, 0)

    def _written(self, state: RequestState, computed: int) -> list[int]:
        return state.block_ids[computed // self._engine.block_tokens :]
