"""What is a block's key made of? The engine's hash, a KV cache group and a mark, for each part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tiers.contract.engine_info import EngineInfo, KVGroup

MISSING, NO_WINDOW, COMPLETE = 0, 1, 2
"""How much of a block is held: all parts (COMPLETE), at least those without a window (NO_WINDOW),
or less (MISSING).

A block without its windowed parts is of use wherever attention windows no longer reach it. Of
models without windows a held block is NO_WINDOW; True and False stand for NO_WINDOW and MISSING.
"""

WAVE = 64
"""Blocks of the first wave of a lookup."""

GROUP_BYTES = 2


class GroupBlock(NamedTuple):
    """One paged block of every block: number `offset` of its group's `per_block`.

    `tokens`: in the paged block. `window`: tokens its attention looks back; None: all of them.
    `is_state`: see `KVGroup`.
    """

    group: int
    offset: int
    per_block: int
    tokens: int
    window: int | None
    is_state: bool


class BlockGroups:
    """The parts of a block, in the order of their keys.

    A block is the smallest number of tokens that is whole in every group. Of an ordinary model,
    with one group, it is one paged block and has one part. A prefix ends with a block: what no
    window reaches from there is no part.
    """

    def __init__(self, engine: EngineInfo) -> None:
        self.block_tokens = engine.block_tokens
        self._hash_tokens = engine.hash_tokens
        self._hash_bytes = 0
        self._parts = [
            GroupBlock(index, offset, self.block_tokens // group.tokens, *group)
            for index, group in enumerate(engine.kv_groups)
            for offset in _reached(self.block_tokens, group)
        ]
        self._sizes = [(index, group.tokens) for index, group in enumerate(engine.kv_groups)]
        self.window = -(-max(map(_reach, engine.kv_groups)) // self.block_tokens)
        # Counted from before the block that is dropped.
        self.window += int(engine.drops_last and self.window > 0)
        """Blocks before the end of a prefix of which every part is needed; 0: no windows."""
        body = sum(self.in_order)  # of windows alone nothing shows where prompts part
        self.parts_kept = body if body and engine.window_interval is not None else len(self)
        """Parts that are kept of every block of a prompt, not only before its end."""
        keeps_few = self.parts_kept < len(self) and all(self.in_rows)
        self.ends = self.window if keeps_few else 0
        """`window`, where all parts beside those are of windows, which are kept before ends."""

    @property
    def is_plain(self) -> bool:
        """Whether every block is one paged block, without a window: the ordinary model's."""
        return len(self._parts) == 1 and self._parts[0].window is None

    @property
    def in_order(self) -> tuple[bool, ...]:
        """Of each part, whether every block of a prompt has it, so that one that is kept stands for
        those before it: of windows and states some are kept."""
        return tuple(part.window is None for part in self._parts)

    @property
    def in_rows(self) -> tuple[bool, ...]:
        """Of each part, whether blocks in a row of a prompt have it and are stored together: of
        states a step leaves one."""
        return tuple(not part.is_state for part in self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def keys(self, hashes: Sequence[bytes], blocks: range, mark: bytes) -> list[bytes]:
        """The keys of all parts of these blocks: the engine's hash, the group, and `mark`, which
        is what else they depend on.

        `hashes` are the request's, one per `hash_tokens` tokens, up to the last block at least.
        """
        if not blocks:
            return []
        self._hash_bytes = len(hashes[0])
        step = self.block_tokens // self._hash_tokens
        of_each: list[list[bytes]] = []
        for part in self._parts:
            end = part.group.to_bytes(GROUP_BYTES, "little") + mark
            at = (part.offset + 1) * part.tokens // self._hash_tokens - 1
            ours = hashes[blocks.start * step + at : blocks.stop * step : step]
            of_each.append([block_hash + end for block_hash in ours])
        if len(of_each) == 1:
            return of_each[0]
        return [key for block in zip(*of_each, strict=True) for key in block]

    def hash_of(self, key: bytes) -> tuple[bytes, int]:
        """The engine's hash and the group in a key made here."""
        group = key[self._hash_bytes : self._hash_bytes + GROUP_BYTES]
        return key[: self._hash_bytes], int.from_bytes(group, "little")

    def places(self, numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
        """The group of each of these keys of a request, and which of the group's paged blocks it
        is, counted from the request's first."""
        for number in numbers:
            block, index = divmod(number, len(self))
            part = self._parts[index]
            yield part.group, block * part.per_block + part.offset

    def coverage(self, parts: Sequence[bool]) -> Sequence[int]:
        """How much is held of each block, given which of all its parts are."""
        size = len(self)
        if size == 1 and not self.window:
            return parts
        each = [parts[start : start + size] for start in range(0, len(parts), size)]
        if not self.window:
            return [NO_WINDOW if all(one) else MISSING for one in each]
        return [self._level(one) for one in each]

    def _level(self, parts: Sequence[bool]) -> int:
        if all(parts):
            return COMPLETE
        body = (has for has, part in zip(parts, self._parts, strict=True) if part.window is None)
        return NO_WINDOW if all(body) else MISSING

    def paged(self, tables: Sequence[Sequence[int]], block: int) -> list[int]:
        """The paged block of each part of a block, in a request's block tables, one per group."""
        return [tables[part.group][block * part.per_block + part.offset] for part in self._parts]

    def blocks_in(self, tables: Sequence[Sequence[int]]) -> int:
        """Blocks of which the block tables have every part but the states."""
        parts = [part for part in self._parts if not part.is_state] or self._parts
        return min(len(tables[part.group]) // part.per_block for part in parts)

    def kept(self, block: int, computed: float) -> list[bool]:
        """Whether the engine keeps each part of a block once `computed` tokens are computed.

        It frees a windowed part when the window of the next token no longer reaches it. Its block
        table does not show where a state is.
        """
        start = block * self.block_tokens
        return [
            part.window is None
            or (
                not part.is_state
                and start + (part.offset + 1) * part.tokens > computed - part.window + 1
            )
            for part in self._parts
        ]

    def add_written(self, found: set[int], tables: Sequence[Sequence[int]], computed: int) -> None:
        """Add the paged blocks, of every group, that a step writes which begins with `computed`
        tokens."""
        for group, tokens in self._sizes:
            found.update(tables[group][computed // tokens :])

    def state(self, group: int, tokens: int) -> int | None:
        """The number, among all parts of a request's blocks, of the state that a group has after
        this many tokens; None: no block ends there."""
        block, rest = divmod(tokens, self.block_tokens)
        parts = [i for i, part in enumerate(self._parts) if part.group == group and part.is_state]
        return None if rest or not block or not parts else (block - 1) * len(self) + parts[-1]


def _reach(group: KVGroup) -> int:
    """Tokens before the end of a prefix that its window reaches; 0: it has none."""
    return 0 if group.window is None else max(1, group.window - 1)


def _reached(block_tokens: int, group: KVGroup) -> range:
    """Which of its paged blocks in a block a window reaches from the block's end; all without."""
    per_block = block_tokens // group.tokens
    needed = -(-_reach(group) // group.tokens) or per_block
    return range(max(0, per_block - needed), per_block)


def waves(blocks: range) -> Iterator[range]:
    """Part `blocks` into waves, each four times as long as the one before.

    Most lookups of a long prompt end in its first blocks.
    """
    start, size = blocks.start, WAVE
    while start < blocks.stop:
        yield range(start, min(start + size, blocks.stop))
        start, size = start + size, 4 * size


def leading(coverage: Sequence[int]) -> int:
    return len(coverage) if all(coverage) else coverage.index(MISSING)


def usable(coverage: Sequence[int], window: int) -> int:
    """The longest prefix of which all blocks are held, its last `window` ones whole."""
    stop = leading(coverage)
    if not window:
        return stop
    longest_so_far = whole = 0
    for block in range(stop):
        whole = whole + 1 if coverage[block] == COMPLETE else 0
        if whole >= min(window, block + 1):
            longest_so_far = block + 1
    return longest_so_far
