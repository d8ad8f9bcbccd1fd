"""The engine's objects as a connector sees them, and the events that the engine takes from it.

The shapes are vLLM's, written down as protocols, so that its scheduler and runner (or the replay
engine) can pass their own objects unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol


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
    def src_block_id(self) -> int: ...

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
    finished_recving: Any
    """Requests whose loads beside the steps have ended, a set of names or None."""

    @property
    def invalid_block_ids(self) -> Set[int]:
        """Paged blocks that failed to load."""


NULL_BLOCK = 0
"""The paged block that stands in a block table for one that the engine does not keep."""


class RequestObserver(Protocol):
    """Sees every request of a chain, on the scheduler's thread, which it never keeps waiting."""

    def arrived(self, request: Request) -> None:
        """A request was queued."""

    def ended(self, request: Request) -> None:
        """A request ended, or was given up; called once, before the chain forgets it."""

    def take_measures(self) -> Mapping[str, Mapping[str, float]]:
        """Measures since the last call, by tier (or `CHAIN`) and by their names in `MEASURES`."""

    def close(self) -> None:
        """Finish within a few seconds."""


Medium = Literal["CPU", "STORAGE"]
"""Where a tier keeps its blocks, by the names that vLLM has: host memory, or anything behind it."""


class Origin(NamedTuple):
    """What an engine's events describe of blocks beside their hashes.

    `tokens`: of all blocks, in order. `extra_keys`: what else each block's hash depends on, one
    entry per block; None: nothing. `session`: whose request it was.
    """

    tokens: Sequence[int] = ()
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: Sequence[Any] | None = None
    session: str | None = None


UNKNOWN = Origin()

Describe = Callable[[Request, int, int, int], Origin]
"""Describes blocks of a request: the token where the first begins, tokens of each, and how many
blocks. Called by the scheduler's thread, does no I/O."""


def describe_nothing(request: Request, first: int, size: int, blocks: int) -> Origin:
    """For engines whose requests show no tokens."""
    return UNKNOWN


@dataclass(frozen=True)
class BlockEvent:
    """Blocks of one KV cache group that a tier now holds (`stored`), or no longer holds.

    Blocks that are stored follow each other in a prompt, the first first, behind the block
    `parent`; None: they begin it. `hashes`, `parent`: the engine's own hashes. `block_tokens`: per
    block of the group. `is_local`: whether only this host finds the blocks.
    """

    tier: str
    medium: Medium
    is_local: bool
    stored: bool
    hashes: tuple[bytes, ...]
    block_tokens: int
    group: int = 0
    parent: bytes | None = None
    origin: Origin = UNKNOWN
