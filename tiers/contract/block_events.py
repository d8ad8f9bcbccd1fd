"""BlockEvent: what a tier came to hold, or lost, in the words that routers read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from tiers.contract.protocols import Request

Medium = Literal["CPU", "STORAGE"]
"""Where a tier keeps its blocks, by the names that vLLM has: host memory, or anything behind it."""


class Origin(NamedTuple):
    """What an engine says of blocks beside their hashes, as it says it of blocks of its own.

    `tokens`: of all blocks, in order. `extra_keys`: what else each block's hash depends on, one
    entry per block; None: nothing. `session`: whose request it was.
    """

    tokens: Sequence[int] = ()
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: Sequence[Any] | None = None
    session: str | None = None


UNKNOWN = Origin()


class Describe(Protocol):
    """Tells the origin of a request's blocks; called by the scheduler's thread, does no I/O."""

    def __call__(self, request: Request, first: int, size: int, blocks: int) -> Origin:
        """Describe so many blocks of `size` tokens, of which the first begins at token `first`."""
        ...


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
