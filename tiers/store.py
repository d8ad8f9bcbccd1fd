"""What must a store do? Keep blocks by the five verbs of `TierStore`.

A store keeps opaque blocks under opaque keys. Its verbs block, take batches and are thread-safe.
Memory belongs to the caller, who keeps it valid and unmoved until the call returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol, TypeVar, cast, runtime_checkable

from tiers.block import digest
from tiers.errors import TierError

Capability = TypeVar("Capability")


class Prefix(NamedTuple):
    """Where a block is in its prompt. `keys`: of blocks of the prompt in a row, this one's at
    number `at`; blocks that are kept together are those of a `group` of so many keys. The first key
    begins a group (see `Packs`)."""

    keys: Sequence[bytes]
    at: int
    group: int


class Block(NamedTuple):
    """One block's key and bytes.

    `payload` is a contiguous, flat view of unsigned bytes (format "B") of the length the store was
    opened with; its address is aligned to 4096 bytes when it lies in the host pool. `get` is given
    a writable one, `put` one that is read-only: other tiers serve the same bytes.
    The caller owns it: a store never keeps it after the call.
    """

    key: bytes
    payload: memoryview

    @property
    def checksum(self) -> bytes | None:
        """The `digest` of the payload as it left the engine, where that is known. Stores may
        write it instead of computing another: a later change is found, without a second pass."""
        return None

    def checksum_of_copy(self) -> bytes | None:
        """The checksum for a copy that is made already, where it is known. Raises RecordError if
        the copy may have another block's bytes."""
        return self.checksum

    @property
    def prefix(self) -> Prefix | None:
        """Where it is in its prompt, for a store with `Packs`, where that is known."""
        return None

    def readonly(self) -> Block:
        """This block, whose payload can't be written to."""
        return Block(self.key, self.payload.toreadonly())

    def has_changed(self) -> bool:
        """Whether the payload is known to have changed since it left the engine."""
        return self.checksum is not None and self.checksum != digest(self.payload)


class GatheredBlock(Block):
    """A block of which more is known: its checksum, where it is to be put, and its prefix."""

    checksum: bytes | None = None
    prefix: Prefix | None = None

    def __new__(
        cls, key: bytes, payload: memoryview, checksum: bytes | None, prefix: Prefix | None = None
    ) -> GatheredBlock:
        self = super().__new__(cls, key, payload)
        self.checksum = checksum
        self.prefix = prefix
        return self

    def readonly(self) -> GatheredBlock:
        return GatheredBlock(self.key, self.payload.toreadonly(), self.checksum, self.prefix)


class TierStore(Protocol):
    """Where blocks are kept. Any verb may raise any error; the guard turns it into a miss.

    Open no more: a verb that finds its store gone for good, as where its folder was removed, raises
    TierNotOpen; it is then closed, and opened anew by its spec.

    Processes: the scheduler's process and each worker open the store, and all see the same blocks.
    With the tier's `store_process` a process beside each worker does, too, and it alone puts.

    Threads: calls overlap, of one verb and of several. In a worker one thread calls `put` and three
    call `get`; in the scheduler's process four threads call `has`, and one `drop` and `clear`. The
    scheduler's own thread calls `peek` and `touch` if the spec says `is_prompt`.

    Batches: `put` and `get` are given 64 blocks and 32 MiB at most (`batch_blocks`), one block at
    least, but one that `Warns` a `put` of none, to be asked again; `peek` and `touch` the keys of a
    whole prompt, thousands of each rank, `has` also those of several prompts; `drop` 256 keys of
    each rank. A verb that takes longer than the spec's `deadline` (10 s) counts as failed, but
    continues, unless it is a put of a process beside.

    Answers: a list with exactly one bool for each key or block, in order.

    Eviction: the blocks of a prefix come in order, and a block is useful only with all its
    predecessors. Of blocks that came in one call evict the last one first: count the first as the
    most recently used. Evicting the first makes all others useless.
    """

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Say for each key whether the store holds its block now."""

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """Store blocks, from payloads that are read-only; True for each that is held afterwards.

        A key that is held already is True, and its block may be skipped. False: this one block was
        not stored, for want of room, say; the others may be.
        """

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        """Fill each block's payload; True for each that now holds, verified, the bytes that were
        put.

        False is a miss: the block is absent or corrupt. Its payload's content is then undefined.
        """

    def drop(self, keys: Sequence[bytes]) -> None:
        """Drop the blocks of these keys; unknown keys are ignored."""

    def close(self) -> None:
        """Release every resource. Idempotent; the guard waits 30 s at most.

        No verb is called afterwards, but some may be in flight: let them end or raise.
        """


@runtime_checkable
class LocalIndex(Protocol):
    """Capability: lookups from this host's memory, without I/O.

    `peek` runs on the engine's scheduler thread, in every step: at most 0.2 us a key for thousands
    of keys (disk: 1 to 2 ms for 8,192), and it never waits for a lock that is held during I/O. A
    store without it is asked by `has`, in the background.
    """

    def peek(self, keys: Sequence[bytes]) -> list[bool]:
        """Say for each key whether the store holds its block now.

        A rare false positive is allowed and costs a failed load, after which the block is computed;
        a false negative costs a computation. Neither serves wrong bytes: `get` verifies.
        """


@runtime_checkable
class Touch(Protocol):
    """Capability: a use of blocks can be recorded without a load."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count these keys as used now, the first as the most recent; unknown keys are ignored.

        Cheap and without I/O, as `peek` is; it may take effect seconds later.
        """


@runtime_checkable
class Clear(Protocol):
    """Capability: the store is used by this host alone, and a namespace in it can be emptied.

    A store that other hosts share must not have it: they may still use what one engine drops.
    """

    def clear(self, namespace: bytes) -> bool:
        """Drop some of the keys that begin with `namespace` (16 bytes); True: call again for more.

        A call drops a few hundred keys at most and ends within milliseconds: other verbs, also
        `put` of other namespaces, are in flight. Blocks put under `namespace` meanwhile may stay.
        """


@runtime_checkable
class Damages(Protocol):
    """Capability: the store counts the damaged blocks that it found."""

    def damaged(self) -> int:
        """Blocks found so far that were not what had been put; none of them is served again. It
        never falls. Asked after each `get`, from its thread."""


@runtime_checkable
class Packs(Protocol):
    """Capability: blocks of one prompt are kept together, and looked up head first.

    `put` and `get` are then given blocks with a `prefix`, where the engine knows it; without one a
    block stands alone. What was put with a prefix may be found with it alone.
    """

    def pack_blocks(self) -> int:
        """Blocks number 0, N, 2N ... of a prompt begin a group; this is N, the same on each host.
        Without I/O. The store of the scheduler's process is asked; a worker's is told."""

    def held_prefix(self, prompts: Sequence[Sequence[bytes]]) -> list[int]:
        """Of the keys of each prompt, in order and from the beginning of a group on, how many are
        held, from the first on. A rare false positive is allowed, as of `peek`."""


@runtime_checkable
class PacksWindows(Protocol):
    """Capability, beside Packs: blocks of attention windows are kept together, too. Any of those
    may be missing: of a prefix that an engine has loaded it has the end alone, so that what it
    stores begins in the midst of a group.

    `put` and `get` are then given them with a `prefix`. A store with Packs alone is given them
    without one, and asked for each by `has`.
    """

    def held_blocks(self, prompts: Sequence[Sequence[bytes]]) -> list[list[bool]]:
        """Of the keys of each prompt, in order and from the beginning of a group on, which are
        held. A rare false positive is allowed, as of `peek`."""


@runtime_checkable
class Remembers(Protocol):
    """Capability: look-ups go by what the store remembers, and others may have removed since."""

    def forget(self) -> None:
        """Remember nothing of before: a block that was found was not there to load. Without I/O."""


class PutCounts(NamedTuple):
    """Counts of all puts so far; none ever falls. `renewed`: blocks that were held already, and not
    stored once more. `evicted`: blocks evicted for room."""

    renewed: int = 0
    evicted: int = 0


@runtime_checkable
class Counts(Protocol):
    """Capability: the store counts what its puts did, for the metrics."""

    def counts(self) -> PutCounts:
        """The counts so far, of this process. Asked after each `put`, from its thread."""


@runtime_checkable
class Reaches(Protocol):
    """Capability: the store is elsewhere, and opening it has reached nobody yet."""

    def reach(self) -> None:
        """Have an answer from there. Raises TierUnavailable. Called once, before any other verb; a
        start does not wait for it."""


@runtime_checkable
class Warns(Protocol):
    """Capability: the store notices that it can't do what its settings ask for."""

    def warning(self) -> str:
        """The reason, for the operator, in the same words while it lasts; empty: none. Asked
        every second or so in the scheduler's process, and after each put."""


class RecentBlocks(NamedTuple):
    """Keys of blocks, the one used last first. `before`: the place behind them, for the next call;
    None: there are no more."""

    keys: Sequence[bytes] = ()
    before: int | None = None


@runtime_checkable
class Recent(Protocol):
    """Capability: the store knows which blocks were used last. A `get` for `warm` is no use of
    them: see `is_use`."""

    def recent(self, namespace: bytes, count: int, before: int | None = None) -> RecentBlocks:
        """Some of the blocks whose keys begin with `namespace`, `count` at most, from the place
        `before` on; None: from the one used last. It may be none of them though there are more."""


@dataclass(frozen=True)
class Usage:
    """What a store holds: `used` and `capacity` in bytes; capacity None: no bound of ours."""

    blocks: int
    used: int
    capacity: int | None


@runtime_checkable
class Measured(Protocol):
    """Capability: the store counts the blocks it holds."""

    def usage(self) -> Usage:
        """Count the blocks held now."""


@runtime_checkable
class Resizable(Protocol):
    """Capability: the capacity can change while the store is open; its spec then says `resizes`."""

    def resize(self, capacity: int) -> None:
        """Hold `capacity` bytes at most from now on, of all processes together, as if it had been
        opened so. Called in each process that has it open, on a thread that puts or measures.

        What is beyond it may be evicted after the return, the least recently used block first.
        """


@runtime_checkable
class Described(Protocol):
    """Capability: the store describes how it works, for the log line of its opening."""

    def describe(self) -> str:
        """Name the place of its blocks and how they are reached, in few words, without secrets."""


def capability(store: TierStore, kind: type[Capability]) -> Capability | None:
    """Return the store as one that has the capability `kind`, or None. Ask each time: a store that
    is opened late has its capabilities from then on, and one that is `Capable` decides when.
    """
    if isinstance(store, Capable):
        return store.capability(kind)
    return store if isinstance(store, kind) else None


def required(store: TierStore, kind: type[Capability]) -> Capability:
    """As `capability`, of a store that has it. Raises TierError."""
    found = capability(store, kind)
    if found is None:
        raise TierError(f"the store has no {kind.__name__}")
    return found


is_use: ContextVar[bool] = ContextVar("is_use", default=True)
"""Whether a `get` on this thread counts its blocks as used; not where no request asked for them."""
_waits: ContextVar[Callable[[], float]] = ContextVar("waits", default=lambda: math.inf)


def time_left() -> float:
    """Seconds that the caller of this verb still waits; `math.inf`: as long as it takes. 0: it is
    given up. A store may then begin nothing more: a `get` answers what has come, and False for the
    rest, or raises if nothing has.

    To be asked within a verb, as often as wanted, since a call can be given up at any time. Known
    on the verb's thread and to coroutines that it hands to a loop; to another thread where that
    runs `contextvars.copy_context().run`.
    """
    return max(0.0, _waits.get()())


class Waiting:
    """A context whose calls are waited for `left()` seconds at most, and no longer than the context
    around it allows."""

    __slots__ = ("_around", "_left", "_token")

    def __init__(self, left: Callable[[], float]) -> None:
        self._left = left
        self._around = _waits.get()
        self._token: Token[Callable[[], float]] | None = None

    def __enter__(self) -> Waiting:
        self._token = _waits.set(lambda: min(self._left(), self._around()))
        return self

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _waits.reset(self._token)

    @property
    def is_over_around(self) -> bool:
        """Whether nobody waits any more, whatever `left` says."""
        return self._around() <= 0


def batch_blocks(payload_bytes: int) -> int:
    """How many blocks of this length `put` and `get` are given at most."""
    return max(1, min(64, (32 << 20) // payload_bytes))


class Capable:
    """A store that decides itself which capabilities it has now."""

    def capability(self, kind: type[Capability]) -> Capability | None:
        """This store as one that has a capability, or None."""
        has = _has(type(self), kind)  # type: ignore[arg-type]
        return cast(Capability, self) if has else None


@cache  # a protocol's own answer is slow, and the engine's thread asks with each look-up
def _has(store: type, kind: type) -> bool:
    return issubclass(store, kind)


class StoreWrapper(Capable):
    """A TierStore over another, which it owns: hands the five verbs on, unless a subclass overrides
    them.

    It has the capabilities that the inner store has now; ask `capability`, not isinstance. One that
    a subclass has all methods of is the wrapper's, any other the inner store's own.
    """

    def __init__(self, store: TierStore) -> None:
        self._inner = store

    def capability(self, kind: type[Capability]) -> Capability | None:
        """This wrapper, or the store in it, as one that has a capability, or None."""
        inner = capability(self._inner, kind)
        own = None if inner is None else super().capability(kind)
        return inner if own is None else own

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return self._inner.has(keys)

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        return self._inner.put(blocks)

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        return self._inner.get(blocks)

    def drop(self, keys: Sequence[bytes]) -> None:
        self._inner.drop(keys)

    def close(self) -> None:
        self._inner.close()


def each(verb: str, answers: object, count: int) -> list[bool]:
    """Return what `verb` answered, in a list of its own, if it is a list of `count` booleans.
    Raises TierError otherwise: a generator, a list of numbers or a string would pass for hits."""
    if not isinstance(answers, list):
        raise TierError(f"{verb} answered a {type(answers).__name__}, not a list of booleans")
    answers = list.copy(answers)  # the store may change its own for the next call
    if len(answers) != count:
        raise TierError(f"{verb} gave {len(answers)} answers for {count}")
    strange = set(map(type, answers)) - {bool}
    if strange:
        kind = strange.pop()
        # numpy's is a bool by name as well.
        name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        raise TierError(f"{verb} answered a {name} where a boolean belongs")
    return answers
