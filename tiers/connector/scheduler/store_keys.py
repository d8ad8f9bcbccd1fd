"""Which blocks a store holds: names of all ranks, and a check of visibility."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress, islice, product
from operator import and_
from types import MappingProxyType
from typing import TypeVar

from tiers.contract.block_groups import COMPLETE, NO_WINDOW, usable
from tiers.contract.generation import Generation, space_of
from tiers.store import LocalIndex, Packs, PacksWindows, Recent, RecentBlocks, TierStore, capability

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")


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

    def _spaces(self, tag: bytes) -> list[bytes]:
        return [space_of(namespace, tag) for namespace in self._namespaces]

    def names(self, keys: Sequence[bytes]) -> list[bytes]:
        """All names of blocks, block by block."""
        # A block's rank parts lie together: a store that evicts one of them loses the block.
        spaces = self._spaces(self._generation.tag)
        return [space + key for key in keys for space in spaces]

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Ask the store which blocks it holds, all of this generation or all of none; on the
        caller's thread."""
        tag = self._generation.tag  # once: a reset may come at any time, on another thread
        is_ours = bool(keys) and keys[0].endswith(tag)
        return _everywhere(self._store.has, self._spaces(tag if is_ours else b""), keys)

    def has_prompts(
        self,
        prompts: Sequence[Sequence[bytes]],
        in_order: Sequence[bool],
        packed: Sequence[bool],
        window: int = 0,
        group: int = 1,
    ) -> list[bool]:
        """As `has`, of a store with `Packs`: of the keys of each prompt, one after the other's. Of
        a block's parts (see `BlockGroups`) those that are `in_order` are held before the first that
        some rank misses. So far the others are asked for: of those that are `packed` which blocks
        of a prompt are there, and for the rest by itself.

        `window`: of the former nearly all blocks but those before ends are nowhere, and each would
        be asked for. They are asked for from the end on, whole groups of `group` blocks, until so
        many follow each other that a prefix may end there; 0: all are.
        """
        size, tag = len(in_order), self._generation.tag
        held = [[False] * len(keys) for keys in prompts]
        counts = [len(keys) // size for keys in prompts]
        spaces = [self._spaces(tag if k and k[0].endswith(tag) else b"") for k in prompts]
        every = list(product(range(len(prompts)), range(size)))

        def place(prompt: int, part: int, blocks: range | None = None) -> slice:
            blocks = range(counts[prompt]) if blocks is None else blocks
            return slice(blocks.start * size + part, blocks.stop * size, size)

        def names(
            some: Sequence[tuple[int, int]], blocks: Mapping[int, range] = MappingProxyType({})
        ) -> list[list[bytes]]:
            """Of these parts of prompts, of each rank. `blocks`: of each prompt; all without."""
            return [
                [space + key for key in prompts[prompt][place(prompt, part, blocks.get(prompt))]]
                for prompt, part in some
                for space in spaces[prompt]
            ]

        heads = [(prompt, part) for prompt, part in every if in_order[part]]
        for (prompt, _), of_ranks in self._by_ranks(heads, self._held_prefix(names(heads))):
            counts[prompt] = min(counts[prompt], *of_ranks)
        for prompt, part in heads:
            held[prompt][place(prompt, part)] = [True] * counts[prompt]
        windows = [part for part in range(size) if packed[part] and not in_order[part]]
        stops = {prompt: count for prompt, count in enumerate(counts) if windows and count}
        far = window + 1 if window else max(counts, default=0)
        while stops:
            asked = {
                i: range(max(0, stop - far) // group * group, stop) for i, stop in stops.items()
            }
            some = [(prompt, part) for prompt in asked for part in windows]
            for (prompt, part), rows in self._by_ranks(some, self._held_blocks(names(some, asked))):
                held[prompt][place(prompt, part, asked[prompt])] = map(all, zip(*rows, strict=True))
            stops = {prompt: blocks.start for prompt, blocks in asked.items() if blocks.start}
            for prompt in [*stops]:
                parts = [held[prompt][place(prompt, part)] for part in windows]
                levels = [COMPLETE if all(one) else NO_WINDOW for one in zip(*parts, strict=True)]
                if usable(levels, window):
                    del stops[prompt]
            far *= 4
        alone = [(prompt, part) for prompt, part in every if not packed[part]]
        keys = [key for prompt, part in alone for key in prompts[prompt][place(prompt, part)]]
        of_alone = iter(self.has(keys) if keys else ())
        for prompt, part in alone:
            held[prompt][place(prompt, part)] = islice(of_alone, counts[prompt])
        return [has for of_prompt in held for has in of_prompt]

    def _by_ranks(self, some: Sequence[T], answers: Sequence[R]) -> Iterator[tuple[T, Sequence[R]]]:
        """Each of these with the answers of all ranks."""
        ranks = len(self._namespaces)
        for number, one in enumerate(some):
            yield one, answers[number * ranks : (number + 1) * ranks]

    def _held_prefix(self, rows: Sequence[Sequence[bytes]]) -> list[int]:
        packs = capability(self._store, Packs)
        return [0] * len(rows) if packs is None or not rows else packs.held_prefix(rows)

    def _held_blocks(self, rows: Sequence[Sequence[bytes]]) -> list[list[bool]]:
        packs = capability(self._store, PacksWindows) if any(rows) else None
        return [[False] * len(row) for row in rows] if packs is None else packs.held_blocks(rows)

    def recent(self, store: Recent, count: int, before: int | None) -> RecentBlocks:
        """The blocks of no generation whose part of the first rank was used last."""
        space = self._namespaces[0]
        names, after = store.recent(space, count, before)
        return RecentBlocks([bytes(name[len(space) :]) for name in names], after)

    def peek(self, index: LocalIndex, keys: Sequence[bytes]) -> list[bool]:
        """Look up in the store's index which blocks it holds. Misses of the first rank are not
        asked of the others: a prompt that is not there costs the same however many there are.
        """
        first, *others = self._spaces(self._generation.tag)
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


class VisibilityCheck:
    """Watches the first blocks that the workers stored, until one is found, and then until one is
    loaded.

    Blocks are noted by the scheduler's thread, and lookups by whichever threads they are made on;
    a lookup that misses what is just being noted only comes to its conclusion later.
    """

    STORED = 4096
    """Blocks remembered, and those of one job more."""
    MISSED = 32
    """Lookups of stored blocks, or loads, that, all in vain, are no accident."""
    OF_LOAD = 8
    """Blocks that count of one load: others may have removed all that it was to load."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._stored: dict[bytes, None] | None = {}
        self._missed = 0
        self._is_found = False
        self._lock = threading.Lock()  # without it two lookups at once could both log it

    def stored(self, keys: Sequence[bytes]) -> None:
        if (stored := self._stored) is not None and len(stored) < self.STORED:
            stored.update(dict.fromkeys(keys))

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
        if stored is None or self._is_found or stored.keys().isdisjoint(keys):
            return
        answers = [has for key, has in zip(keys, held, strict=True) if key in stored]
        if any(answers):
            with self._lock:
                self._is_found, self._missed = True, 0
            return
        self._in_vain(
            len(answers),
            False,
            "tier %s: blocks are stored, and none of the %d asked for since was found: its "
            "capacity is so small that all is evicted before it is asked for, or what one process "
            "puts the others do not see. The scheduler's process and each worker open the store "
            "separately: keep blocks in a file, a server or shared memory",
        )

    def loaded(self, any_arrived: bool, lost: Sequence[bytes]) -> None:
        """A load ended; `lost`: what the store did not have."""
        if (stored := self._stored) is None:
            return
        if any_arrived:
            self._stored = None
            return
        self._in_vain(
            min(sum(key in stored for key in lost), self.OF_LOAD),
            True,
            "tier %s: blocks are stored and found, and none of the %d loaded since was there: it "
            "says that it has what it does not keep, or keeps other bytes than were put, or evicts "
            "all before it is loaded. kvtiers check tries a store",
        )

    def _in_vain(self, count: int, is_found: bool, line: str) -> None:
        with self._lock:
            if self._is_found != is_found:  # by another lookup, meanwhile
                return
            self._missed += count
            if self._missed < self.MISSED or self._stored is None:
                return
            self._stored = None
        logger.warning(line, self._tier, self._missed)
