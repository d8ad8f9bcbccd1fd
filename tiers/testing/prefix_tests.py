"""Tests of a store that keeps blocks of one prompt together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tiers.store import GatheredBlock, Packs, PacksWindows, Prefix, TierStore, each
from tiers.testing.harness import Memory, StoreUnderTest, at_once, listed, make_key

_BYTES = 4096
_RACES = 12


class PrefixTests(StoreUnderTest):
    """What `put`, `get` and the look-ups make of a prompt, stored as an engine does."""

    def test_a_prompt_is_found_and_got_from_any_block_on(self) -> None:
        with self.opened_having(Packs, _BYTES) as (store, packs):
            group = packs.pack_blocks()
            assert type(group) is int and group > 0, f"pack_blocks is {group!r}"
            keys = _prompt(3 * group + 2)
            assert _counted(packs, keys) == 0
            self._put_prompt(store, keys)
            assert _counted(packs, keys) == len(keys)
            assert _counted(packs, [*keys, *_prompt(5)]) == len(keys), "held, and never put"
            for first in (0, 1, group - 1, group, len(keys) - 1):
                self._load(store, keys, range(first, len(keys)))
            self._load(store, keys, range(0, len(keys), 3))
            self._load(store, keys, [1, 1, 2, 2])  # requests that begin alike ask together
            assert all(listed(store.has(keys))), "has of a whole prompt misses what was put"
            if self.shared:
                with self.opened(_BYTES) as other:  # knows nothing of those
                    self._load(other, keys, range(group + 1, len(keys)))
                    assert _counted(self.having(other, Packs), keys) == len(keys)

    def test_prompts_that_part_share_what_they_have_in_common(self) -> None:
        with self.opened_having(Packs, _BYTES) as (store, packs):
            group = packs.pack_blocks()
            for common in (group // 2, group, group + 1):
                one = _prompt(2 * group + 1)
                other = one[:common] + _prompt(group + 1)
                self._put_prompt(store, one)
                assert _counted(packs, other) == common
                self._put_prompt(store, other, common)
                for keys in (one, other):
                    assert _counted(packs, keys) == len(keys)
                    self._load(store, keys, range(len(keys)))

    def test_blocks_that_come_one_by_one(self) -> None:
        """As those of an answer do; and a batch may begin anywhere."""
        with self.opened_having(Packs, _BYTES) as (store, packs):
            keys = _prompt(packs.pack_blocks() + 7)
            self._put_prompt(store, keys[:3])
            for count in range(4, len(keys) + 1):
                self._put_prompt(store, keys[:count], count - 1)
            assert _counted(packs, keys) == len(keys)
            self._load(store, keys, range(2, len(keys)))
            self._put_prompt(store, keys)
            self._load(store, keys, range(len(keys)))

    def test_a_dropped_block_of_a_prompt_is_gone(self) -> None:
        with self.opened_having(Packs, _BYTES) as (store, packs):
            keys = _prompt(packs.pack_blocks())
            self._put_prompt(store, keys)
            at = len(keys) // 2
            store.drop([keys[at]])
            assert _counted(packs, keys) <= at
            assert not self._hits(store, keys, [at])[0], "a dropped block is served"
            self._put_prompt(store, keys)
            self._load(store, keys, range(len(keys)))

    def test_two_that_store_what_begins_alike_at_once(self) -> None:
        """Each finds its own prompt whole, whoever came first."""
        self.claimed("shared")
        with self.opened(_BYTES) as one, self.opened(_BYTES) as other:
            self.having(one, Packs)
            for count in range(4, 4 + _RACES):
                first = _prompt(count)
                prompts = [first + _prompt(count) for _ in range(2)]
                stores = zip((one, other), prompts, strict=True)
                at_once([partial(self._put_prompt, *pair) for pair in stores])
                for keys in prompts:
                    self._load(one, keys, range(len(keys)))

    def test_several_prompts_at_once(self) -> None:
        with self.opened_having(Packs, _BYTES) as (store, packs):
            prompts = [_prompt(count) for count in (1, 3, packs.pack_blocks() + 2)]
            for keys in prompts[1:]:
                self._put_prompt(store, keys)
            asked = [*prompts, [], prompts[2][:2]]
            found: object = packs.held_prefix(asked)
            assert found == [0, len(prompts[1]), len(prompts[2]), 0, 2], f"held_prefix: {found}"

    def test_a_prompt_whose_first_blocks_were_never_put(self) -> None:
        """As of a window, of which an engine that has loaded a prefix has the end alone."""
        with self.opened_having(PacksWindows, _BYTES) as (store, windows):
            group = self.having(store, Packs).pack_blocks()
            keys = _prompt(3 * group + 2)
            first = group // 2 + 1
            self._put_prompt(store, keys, first)
            held = [number >= first for number in range(len(keys))]
            assert self._held(windows, keys) == held
            assert self._held(windows, keys[: first + 1]) == held[: first + 1]
            for start in (first, first + 1, group, len(keys) - 1):
                self._load(store, keys, range(start, len(keys)))
            if self.shared:
                with self.opened(_BYTES) as other:  # knows nothing of those
                    self._load(other, keys, range(first + 1, first + 2))
                    assert self._held(self.having(other, PacksWindows), keys) == held
            self._put_prompt(store, keys)
            assert all(self._held(windows, keys))
            self._load(store, keys, range(len(keys)))

    def test_any_blocks_of_a_prompt_may_be_missing(self) -> None:
        with self.opened_having(PacksWindows, _BYTES) as (store, windows):
            group = self.having(store, Packs).pack_blocks()
            keys = _prompt(2 * group + 3)
            some = sorted({0, 1, group // 2, group - 1, group + 1, group + 2, len(keys) - 1})
            for number in some:
                self._put_prompt(store, keys[: number + 1], number)
            held = [number in some for number in range(len(keys))]
            found: object = windows.held_blocks([_prompt(3), keys, [], keys[:2]])
            assert found == [[False] * 3, held, [], held[:2]], f"held_blocks: {found}"
            assert self._hits(store, keys, range(len(keys))) == held
            store.drop([keys[0]])
            assert not self._held(windows, keys)[0], "a dropped block is held"

    def _held(self, windows: PacksWindows, keys: Sequence[bytes]) -> list[bool]:
        (held,) = windows.held_blocks([keys])
        return each("held_blocks", held, len(keys))

    def _put_prompt(self, store: TierStore, keys: Sequence[bytes], first: int = 0) -> None:
        """Store a prompt from block `first` on, in batches."""
        group = self.having(store, Packs).pack_blocks()
        for start in range(first, len(keys), 64):
            numbers = range(start, min(start + 64, len(keys)))
            assert all(self.stored(store, _placed(keys, numbers, group).fill()))

    def _load(self, store: TierStore, keys: Sequence[bytes], numbers: Sequence[int]) -> None:
        hits = self._hits(store, keys, numbers)
        lost = [number for number, hit in zip(numbers, hits, strict=True) if not hit]
        assert not lost, f"blocks {lost} of a prompt were put and are misses"

    def _hits(self, store: TierStore, keys: Sequence[bytes], numbers: Sequence[int]) -> list[bool]:
        group = self.having(store, Packs).pack_blocks()
        hits: list[bool] = []
        for start in range(0, len(numbers), 64):
            hits += self.got(store, _placed(keys, numbers[start : start + 64], group))
        return hits


def _prompt(count: int) -> list[bytes]:
    space = make_key(16)
    return [make_key(48, start=space) for _ in range(count)]


def _counted(packs: Packs, keys: Sequence[bytes]) -> int:
    return packs.held_prefix([keys])[0]


def _placed(keys: Sequence[bytes], numbers: Sequence[int], group: int) -> Memory:
    """Memory for these blocks of a prompt, which know their places in it."""
    memory = Memory([keys[number] for number in numbers], _BYTES)
    base = numbers[0] - numbers[0] % group
    known = keys[base : numbers[-1] + 1]
    memory.blocks = [
        GatheredBlock(block.key, block.payload, None, Prefix(known, number - base, group))
        for block, number in zip(memory.blocks, numbers, strict=True)
    ]
    return memory
