"""TierStore: the seam that a disk, a Redis or a plugin's tier implements.

A store keeps opaque blocks under opaque keys. Its verbs are blocking, batch-first and
thread-safe: several threads (and, for a shared tier, several processes) call them at once.
Memory always belongs to the caller, who keeps it valid and unmoved until the call returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

Wrapper = TypeVar("Wrapper")


class Block(NamedTuple):
    """One block's key and bytes.

    `payload` is a writable, contiguous, flat view of unsigned bytes (format "B") of the length
    the store was opened with; its address is aligned to 4096 bytes when it lies in the host pool.
    The caller owns it: a store never keeps it after the call.
    """

    key: bytes
    payload: memoryview


class TierStore(Protocol):
    """Where blocks are kept. Every verb may raise a `TierError`; the guard makes that a miss."""

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Say for each key whether the store holds its block now."""
        ...

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """Store blocks; True for each that the store holds afterwards.

        A key that is already held counts as True and may be skipped. False means that this one
        block was not stored (no room, say); the others still are.
        """
        ...

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        """Fill each block's payload; True for each that now holds, verified, what was put.

        False is a miss: absent, corrupt, or another's record. The payload's content is then
        undefined and must not be used.
        """
        ...

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget these keys; unknown ones are ignored."""
        ...

    def close(self) -> None:
        """Release every resource. Idempotent; no other verb is called afterwards."""
        ...


@runtime_checkable
class LocalIndex(Protocol):
    """Capability: presence is answered from this host's memory, without I/O.

    `peek` is `has` for the engine's scheduler thread: microseconds, never a wait on a lock that
    is held during I/O. A store without it is asked in the background.
    """

    def peek(self, keys: Sequence[bytes]) -> list[bool]:
        """Say for each key whether the store holds its block now."""
        ...


@runtime_checkable
class Touch(Protocol):
    """Capability: recency can be refreshed without a load."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count these keys as used now. Cheap and without I/O; it may take effect later."""
        ...


@runtime_checkable
class Clear(Protocol):
    """Capability: the store is of this host alone, and a namespace in it can be emptied.

    A store that other hosts share has it not: they may still use what one engine gives up.
    """

    def clear(self, namespace: bytes) -> bool:
        """Forget some of the keys that begin with these bytes; True: there may be more, call again.

        A call ends within a moment, however many keys there are.
        """
        ...


@runtime_checkable
class Damages(Protocol):
    """Capability: the store counts what it found damaged."""

    def damaged(self) -> int:
        """Blocks found, so far, that were not what had been put; none of them is served again."""
        ...


@dataclass(frozen=True)
class Usage:
    """What a store holds: `used` and `capacity` in bytes (capacity None: not bounded by us)."""

    blocks: int
    used: int
    capacity: int | None


@runtime_checkable
class Measured(Protocol):
    """Capability: the store knows what it holds."""

    def usage(self) -> Usage:
        """Count what is held now."""
        ...


def with_capabilities(
    base: type[Wrapper], store: TierStore, parts: Sequence[tuple[type, type[Wrapper]]]
) -> type[Wrapper]:
    """The class for a wrapper of this store: `base`, and of its subclasses in `parts` those whose
    capability the store has. Capabilities are found by isinstance, so a method that the store
    lacks must not exist.
    """
    made = tuple(part for capability, part in parts if isinstance(store, capability))
    return type(base.__name__, made, {}) if made else base
