"""A store that packs prompts is asked for whole groups, and told where a job's blocks are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest

from tests.support.clock import wait_for
from tiers.connector.scheduler.lookups import Lookup
from tiers.connector.scheduler.store_manager import StoreManager
from tiers.contract.generation import Generation
from tiers.contract.messages import NO_PLACE
from tiers.store import Block, TierStore
from tiers.wrappers.guard import Guarded

KEYS = [b"key %d." % number for number in range(24)]
SPACES = [b"one rank's space", b"other rank space"]


class Plain:
    """Holds nothing, somewhere behind a network."""

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys)

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        return [False] * len(blocks)

    get = put

    def drop(self, keys: Sequence[bytes]) -> None:
        pass

    def close(self) -> None:
        pass


class Packing(Plain):
    """Holds `held` blocks of each prompt of a space."""

    def __init__(self) -> None:
        self.held = dict.fromkeys(SPACES, 0)
        self.asked: list[Sequence[bytes]] = []
        self.alone: set[bytes] = set()
        self.asked_alone: list[bytes] = []

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        self.asked_alone += keys
        return [key in self.alone for key in keys]

    def pack_blocks(self) -> int:
        return 4

    def held_prefix(self, prompts: Sequence[Sequence[bytes]]) -> list[int]:
        self.asked += prompts
        return [self.held[keys[0][:16]] for keys in prompts]


class PackingWindows(Packing):
    """Holds the `windows`, too."""

    def __init__(self) -> None:
        super().__init__()
        self.windows: set[bytes] = set()
        self.asked_for_windows: list[Sequence[bytes]] = []

    def held_blocks(self, prompts: Sequence[Sequence[bytes]]) -> list[list[bool]]:
        self.asked_for_windows += prompts
        return [[key in self.windows for key in keys] for keys in prompts]


@pytest.fixture
def store() -> Packing:
    return Packing()


@pytest.fixture
def manager(store: Packing) -> Iterator[StoreManager]:
    with closing(_manager(store, (True,))) as made:
        yield made


def _manager(
    store: TierStore, in_order: Sequence[bool], in_rows: Sequence[bool] = (), window: int = 0
) -> StoreManager:
    return StoreManager(
        Guarded(store, "tier"),
        SPACES,
        Generation(),
        in_order=in_order,
        in_rows=in_rows,
        window=window,
    )


def _covered(manager: StoreManager, asked: range) -> list[bool]:
    lookup = Lookup()
    manager.coverage(lookup, KEYS, asked)
    wait_for(lambda: manager.coverage(lookup, KEYS, asked) is not None)
    found = manager.coverage(lookup, KEYS, asked)
    assert found is not None
    return list(found)


def test_a_look_up_begins_with_a_group_and_counts_what_all_ranks_have(
    manager: StoreManager, store: Packing
) -> None:
    store.held = {SPACES[0]: 5, SPACES[1]: 4}  # from block 4 on
    assert _covered(manager, range(6, 11)) == [True, True, False, False, False]
    assert store.asked == [[space + key for key in KEYS[4:]] for space in SPACES]


def test_a_job_says_where_its_blocks_are(manager: StoreManager) -> None:
    part = manager.place(KEYS, [6, 7, 9])
    assert part.keys == KEYS[4:10] and list(part.places) == [2, 3, 5] and part.group == 4
    (first, *_) = part.prefixes(SPACES[0], 3)
    assert first is not None
    assert first.keys[first.at] == SPACES[0] + KEYS[6] and first.group == 4


def test_of_several_parts_each_that_is_in_order_is_a_prompt_and_windows_are_asked_for_behind_it(
    store: Packing,
) -> None:
    """Of three parts two are in order, and the window's is asked for as far as those are held."""
    store.held = {SPACES[0]: 3, SPACES[1]: 2}
    store.alone = {space + KEYS[16] for space in SPACES} | {SPACES[0] + KEYS[13]}
    with closing(_manager(store, (True, False, True))) as made:
        found = _covered(made, range(15, 24))
        assert found == [True, True, True, *[False] * 6]
        assert store.asked == [
            [space + key for key in KEYS[part::3][4:]] for part in (0, 2) for space in SPACES
        ]
        assert store.asked_alone == [space + KEYS[at] for space in SPACES for at in (13, 16)]
        part = made.place(KEYS, [15, 16, 20])
        assert part.keys == KEYS[12:21] and list(part.places) == [3, 4, 8]
        first, window, last = part.prefixes(SPACES[0], 3)
    assert window is None and first is not None and last is not None
    assert (first.keys[first.at], first.at) == (SPACES[0] + KEYS[15], 1)
    assert (last.keys[last.at], last.at) == (SPACES[0] + KEYS[20], 2)


def test_windows_are_prompts_of_their_own_and_states_are_asked_for_one_by_one() -> None:
    """Of three parts the second is a window's and the third a state's."""
    store = PackingWindows()
    store.held = {SPACES[0]: 3, SPACES[1]: 2}
    store.windows = {space + KEYS[at] for space in SPACES for at in (13, 19)} | {
        SPACES[0] + KEYS[16]
    }
    store.alone = {space + KEYS[17] for space in SPACES}
    kinds = (True, False, False), (True, True, False)
    with closing(_manager(store, *kinds)) as made:
        found = _covered(made, range(12, 24))
        assert found == [True, True, False, True, False, True, *[False] * 6]
        assert store.asked_for_windows == [[space + KEYS[13], space + KEYS[16]] for space in SPACES]
        assert store.asked_alone == [space + KEYS[at] for space in SPACES for at in (14, 17)]
        part = made.place(KEYS, [15, 16, 17])
    first, window, state = part.prefixes(SPACES[0], 3)
    assert first is not None and window is not None and state is None
    assert (window.keys[window.at], window.at) == (SPACES[0] + KEYS[16], 1)
    assert window.keys is not first.keys


@pytest.mark.parametrize(
    ("kept", "first"), [((10, 11), [8]), ((3, 4, 10), [8, 0]), ((), [8, 0]), ((0,), [8, 0])]
)
def test_windows_are_asked_for_from_the_end_on_until_a_prefix_may_end_there(
    kept: tuple[int, ...], first: list[int]
) -> None:
    """Twelve blocks of two parts, of whose windows two in a row are needed."""
    store = PackingWindows()
    store.held = dict.fromkeys(SPACES, 12)
    store.windows = {space + KEYS[2 * block + 1] for space in SPACES for block in kept}
    with closing(_manager(store, (True, False), (True, True), window=2)) as made:
        found = _covered(made, range(24))
    assert found == [part == 0 or block in kept for block in range(12) for part in range(2)]
    ends = [12, *first]
    assert store.asked_for_windows == [
        [space + KEYS[2 * block + 1] for block in range(start, stop)]
        for start, stop in zip(first, ends, strict=False)
        for space in SPACES
    ]


def test_nothing_is_asked_of_windows_behind_a_miss() -> None:
    store = PackingWindows()
    kinds = (True, False), (True, True)
    with closing(_manager(store, *kinds)) as made:
        assert _covered(made, range(24)) == [False] * 24
    assert store.asked and not store.asked_for_windows and not store.asked_alone


def test_a_model_of_windows_alone_has_prompts_of_them() -> None:
    store = PackingWindows()
    store.windows = {space + KEYS[5] for space in SPACES}
    kinds = (False,), (True,)
    with closing(_manager(store, *kinds)) as made:
        assert _covered(made, range(4, 7)) == [False, True, False]
        assert not store.asked and len(store.asked_for_windows[0]) == 20
    old = Packing()
    with closing(_manager(old, *kinds)) as made:
        assert _covered(made, range(4, 7)) == [False] * 3
        assert made.place(KEYS, [5]) == NO_PLACE


def test_others_are_asked_for_each_block_and_told_nothing(store: Packing) -> None:
    with closing(_manager(store, ())) as of_several_groups:
        assert _covered(of_several_groups, range(2)) == [False, False]
        assert of_several_groups.place(KEYS, [1]) == NO_PLACE
    with closing(_manager(Plain(), (True,))) as plain:
        assert _covered(plain, range(2)) == [False, False]
        assert plain.place(KEYS, [1]) == NO_PLACE
    assert not store.asked
