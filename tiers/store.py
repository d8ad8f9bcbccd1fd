"""TierStore: the seam that a disk, a Redis or a plugin's tier implements.

A store keeps opaque blocks under opaque keys. Its verbs are blocking, batch-first and
thread-safe: several threads (and, for a shared tier, several processes) call them at once.
Memory always belongs to the caller, who keeps it valid and unmoved until the call returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar, cast, runtime_checkable

from tiers.errors import TierError

Capability = TypeVar("Capability")


class Block(NamedTuple):
    """One block's key and bytes.

    `payload` is a writable, contiguous, flat view of unsigned bytes (format "B") of the length
    the store was opened with; its address is aligned to 4096 bytes when it lies in the host pool.
    The caller owns it: a store never keeps it after the call.
    """

    key: bytes
    payload: memoryview


class TierStore(Protocol):
    """Where blocks are kept. Every verb may raise a `TierError`; the guard makes that a miss.

    The scheduler's process and each worker open the store separately, and must see the same
    blocks. What answers a list answers a list of booleans, one for each key or block.

    For stores that evict: a prefix's blocks come head to tail in one call, and a block is of use
    only with all that precede it. So of those that came together the tail should go first: count
    the first as the last used. The obvious order, which evicts the head first, serves nothing.
    """

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


@runtime_checkable
class Described(Protocol):
    """Capability: the store tells how it works, for the log line of its opening."""

    def describe(self) -> str:
        """Name the place of its blocks and the way to them, in a few words without a secret."""
        ...


def capability(store: TierStore, kind: type[Capability]) -> Capability | None:
    """The store as one that has a capability, or None if it has not. Ask each time: a store that
    is opened late has its capabilities from then on. A wrapper answers for what it is around.
    """
    if isinstance(store, StoreWrapper):
        return store.capability(kind)
    return store if isinstance(store, kind) else None


class StoreWrapper:
    """A TierStore over another, which it owns: as the other does, unless a subclass says more.

    It has the capabilities that the other has now; `capability` tells, isinstance does not.
    """

    def __init__(self, store: TierStore) -> None:
        self._inner = store

    def capability(self, kind: type[Capability]) -> Capability | None:
        """This wrapper as one that has a capability, or None."""
        return None if capability(self._inner, kind) is None else cast(Capability, self)

    def _inner_as(self, kind: type[Capability]) -> Capability:
        found = capability(self._inner, kind)
        if found is None:
            raise TierError(f"the store has no {kind.__name__}")
        return found

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """As the store."""
        return self._inner.has(keys)

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """As the store."""
        return self._inner.put(blocks)

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        """As the store."""
        return self._inner.get(blocks)

    def drop(self, keys: Sequence[bytes]) -> None:
        """As the store."""
        self._inner.drop(keys)

    def close(self) -> None:
        """Close the store."""
        self._inner.close()

    def peek(self, keys: Sequence[bytes]) -> list[bool]:
        """As the store, if it has a LocalIndex."""
        return self._inner_as(LocalIndex).peek(keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        """As the store, if it has Touch."""
        self._inner_as(Touch).touch(keys)

    def clear(self, namespace: bytes) -> bool:
        """As the store, if it has Clear."""
        return self._inner_as(Clear).clear(namespace)

    def damaged(self) -> int:
        """As the store, if it has Damages."""
        return self._inner_as(Damages).damaged()

    def usage(self) -> Usage:
        """As the store, if it is Measured."""
        return self._inner_as(Measured).usage()

    def describe(self) -> str:
        """As the store, if it is Described."""
        return self._inner_as(Described).describe()


def each(verb: str, answers: object, count: int) -> list[bool]:
    """What a verb answered for `count` keys or blocks: a list of as many booleans.

    Raises TierError for anything else: what is nearly right (a generator, a list of numbers, a
    string) would pass for hits.
    """
    if not isinstance(answers, list):
        raise TierError(f"{verb} answered a {type(answers).__name__}, not a list of booleans")
    if len(answers) != count:
        raise TierError(f"{verb} gave {len(answers)} answers for {count}")
    strange = set(map(type, answers)) - {bool}
    if strange:
        raise TierError(f"{verb} answered a {strange.pop().__name__} where a boolean belongs")
    return answers
