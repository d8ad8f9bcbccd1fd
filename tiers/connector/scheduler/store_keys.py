"""Which blocks a store holds: names of all ranks, keys seen of late, and a check of visibility."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from operator import and_

from tiers.contract.generation import Generation, space_of
from tiers.store import LocalIndex, Packs, Recent, RecentBlocks, TierStore, capability


class RankKeys:
    """The names of blocks in a store, one for each rank, and which blocks are held of all ranks.

    `namespaces`: one per rank, or one of ranks that have the same part of a block.
    """

    def __init__(
        self, store: TierStore, namespaces: Sequence[bytes], generation: Generation
    ) -> None:
        self._store = store
        self._namespaces = namespaces
        self._generation = generation

    def __len__(self) -> int:
        return len(self._namespaces)

    def _spaces(self) -> list[bytes]:
        return self._spaces_of(self._generation.tag)

    def _spaces_of(self, tag: bytes) -> list[bytes]:
        return [space_of(namespace, tag) for namespace in self._namespaces]

    def names(self, keys: Sequence[bytes]) -> list[bytes]:
        """All names of blocks, block by block."""
        # A block's rank parts lie together: a store that evicts one of them loses the block.
        spaces = self._spaces()
        return [space + key for key in keys for space in spaces]

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Ask the store which blocks it holds, all of this generation or all of none; on the
        caller's thread."""
        tag = self._generation.tag  # once: a reset may come at any time, on another thread
        is_ours = bool(keys) and keys[0].endswith(tag)
        return _everywhere(self._store.has, self._spaces_of(tag if is_ours else b""), keys)

    def has_prefixes(
        self, prompts: Sequence[Sequence[bytes]], in_order: Sequence[bool]
    ) -> list[bool]:
        """As `has`, of a store with `Packs`: of the keys of each prompt those before the first that
        some rank misses; one after the other's. Of a block's parts (see `BlockGroups`) those that
        are not `in_order` are asked for by themselves, as far as all others are held."""
        tag = self._generation.tag
        parts, asked = len(in_order), list[list[bytes]]()
        for keys in prompts:
            spaces = self._spaces_of(tag if keys and keys[0].endswith(tag) else b"")
            for part in compress(range(parts), in_order):
                asked += [[space + key for key in keys[part::parts]] for space in spaces]
        packs = capability(self._store, Packs)
        counts = [0] * len(asked) if packs is None else packs.held_prefix(asked)
        each = sum(in_order) * len(self._namespaces)
        blocks = [min(counts[start : start + each]) for start in range(0, len(counts), each)]
        whole = [[*in_order] * count for count in blocks]
        alone = [
            key
            for keys, known in zip(prompts, whole, strict=True)
            for key, is_known in zip(keys, known, strict=False)
            if not is_known
        ]
        of_alone = iter(self.has(alone) if alone else ())
        held: list[bool] = []
        for keys, known in zip(prompts, whole, strict=True):
            held += [is_known or next(of_alone) for is_known in known]
            held += [False] * (len(keys) - len(known))
        return held

    def recent(self, store: Recent, count: int, before: int | None) -> RecentBlocks:
        """The blocks of no generation whose part of the first rank was used last."""
        space = self._namespaces[0]
        names, after = store.recent(space, count, before)
        return RecentBlocks([bytes(name[len(space) :]) for name in names], after)

    def peek(self, index: LocalIndex, keys: Sequence[bytes]) -> list[bool]:
        """Look up in the store's index which blocks it holds. Misses of the first rank are not
        asked of the others: a prompt that is not there costs the same however many there are.
        """
        first, *others = self._spaces()
        held = index.peek([first + key for key in keys])
        if others and (some := list(compress(keys, held))):
            of_others = iter(_everywhere(index.peek, others, some))
            held = [has and next(of_others) for has in held]
        return held


def _everywhere(
    has: Callable[[Sequence[bytes]], list[bool]], spaces: Sequence[bytes], keys: Sequence[bytes]
) -> list[bool]:
    """Which keys are held in all these spaces, asked in one call: behind a network each costs a
    round trip."""
    found = has([space + key for space in spaces for key in keys])
    held = found[: len(keys)]
    for start in range(len(keys), len(found), len(keys) or 1):
        held = list(map(and_, held, found[start : start + len(keys)]))
    return held


class RecentKeys:
    """Remembers keys for `seconds` at most and half of it at least, up to `limit` of them.

    In two plain dicts, the younger of which takes the other's place when it is full or old, since
    dicts of bytes alone are nothing that Python's garbage collector looks at. Used by one thread.
    """

    def __init__(self, limit: int, seconds: float, clock: Callable[[], float]) -> None:
        self._half = max(1, limit // 2)
        self._seconds = seconds / 2  # in each of the two
        self._clock = clock
        self._until = clock() + self._seconds
        self._young: dict[bytes, None] = {}
        self._old: dict[bytes, None] = {}

    def add(self, keys: Iterable[bytes]) -> None:
        """Remember these keys from now on."""
        self._age()
        self._young.update(dict.fromkeys(keys))
        if len(self._young) >= self._half:
            self._turn()

    def known(self, keys: Sequence[bytes]) -> list[bool]:
        self._age()
        young, old = self._young, self._old
        return [key in young or key in old for key in keys]

    def discard(self, key: bytes) -> None:
        self._young.pop(key, None)
        self._old.pop(key, None)

    def clear(self) -> None:
        self._young, self._old = {}, {}

    def _age(self) -> None:
        now = self._clock()
        if now >= self._until + self._seconds:
            self.clear()
            self._until = now + self._seconds
        elif now >= self._until:
            self._turn()
            self._until += self._seconds

    def _turn(self) -> None:
        self._young, self._old = {}, self._young


logger = logging.getLogger(__name__)


class VisibilityCheck:
    """Watches the first blocks that the workers stored, until one of them is found.

    Blocks are noted by the scheduler's thread, and lookups by whichever threads they are made on;
    a lookup that misses what is just being noted only comes to its conclusion later.
    """

    STORED = 4096
    """Blocks remembered."""
    MISSED = 32
    """Lookups of stored blocks that, all in vain, are no accident."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._stored: dict[bytes, None] | None = {}
        self._missed = 0
        self._lock = threading.Lock()  # without it two lookups at once could both log it

    def stored(self, key: bytes) -> None:
        """The workers have stored a block."""
        if self._stored is not None and len(self._stored) < self.STORED:
            self._stored[key] = None

    def lost(self, key: bytes) -> None:
        """A block is known to be gone."""
        if self._stored is not None:
            self._stored.pop(key, None)

    def reset(self) -> None:
        if self._stored is not None:
            self._stored = {}

    def asked(self, keys: Sequence[bytes], held: Sequence[bool]) -> None:
        """A store that works was asked for these keys."""
        stored = self._stored
        if stored is None or stored.keys().isdisjoint(keys):
            return
        answers = [has for key, has in zip(keys, held, strict=True) if key in stored]
        if any(answers):
            self._stored = None
            return
        with self._lock:
            self._missed += len(answers)
            if self._missed < self.MISSED or self._stored is None:
                return
            self._stored = None
        logger.warning(
            "tier %s: blocks are stored, and none of the %d asked for since was found. The "
            "scheduler's process and each worker open the store separately: what one puts the "
            "others must see, in a file, a server or shared memory. Or its capacity is so "
            "small that all is evicted before it is asked for",
            self._tier,
            self._missed,
        )
