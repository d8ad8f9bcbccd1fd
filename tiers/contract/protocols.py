"""The engine's objects as a connector sees them.

The shapes are vLLM's, written down as protocols, so that its scheduler and runner (or the replay
engine) can pass their own objects unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Request(Protocol):
    """A request as the scheduler sees it."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained hashes of the full blocks of all known tokens; it only grows."""


class Blocks(Protocol):
    """A request's blocks in the paged KV."""

    def get_block_ids(self) -> tuple[list[int], ...]: ...


class NewRequest(Protocol):
    """A request in the first step that runs it."""

    @property
    def req_id(self) -> str: ...
    @property
    def block_ids(self) -> tuple[list[int], ...]: ...
    @property
    def num_computed_tokens(self) -> int: ...


class CachedRequests(Protocol):
    """Requests that ran before; parallel lists."""

    @property
    def req_ids(self) -> Sequence[str]: ...
    @property
    def resumed_req_ids(self) -> set[str]: ...
    @property
    def new_block_ids(self) -> Sequence[tuple[list[int], ...] | None]: ...
    @property
    def num_computed_tokens(self) -> Sequence[int]: ...


class BlockState(Protocol):
    """States of recurrent layers that a step leaves at the ends of blocks."""

    @property
    def boundary_state_offloads(self) -> Mapping[str, Sequence[tuple[int, int, int]]]:
        """By request: KV cache group, paged block, and the tokens after which the state is. It
        stays there until the step's end."""


class BlockCopy(Protocol):
    """A paged block that a step copies before it computes."""

    @property
    def dst_block_id(self) -> int: ...


class SchedulerOutput(Protocol):
    """What one step will run. Those of vLLM that know such layers also have
    `kv_connector_block_state`, a BlockState or None, and `kv_cache_block_copies`, a sequence of
    BlockCopy or None."""

    @property
    def scheduled_new_reqs(self) -> Sequence[NewRequest]: ...
    @property
    def scheduled_cached_reqs(self) -> CachedRequests: ...
    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]: ...


class ConnectorOutput(Protocol):
    """What the workers of one step sent back, aggregated over ranks."""

    kv_connector_worker_meta: Any


NULL_BLOCK = 0
"""The paged block that stands in a block table for one that the engine does not keep."""
