"""What the kit finds in stores that ask how long their callers wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import SkipTest

import pytest

from tiers.store import Block, time_left
from tiers.testing import MemoryStore, StoreContract


class Sound(MemoryStore):
    """Ends between two blocks."""

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        return [time_left() > 0 and self._copy_to(block) for block in blocks]

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        return [time_left() > 0 and super(Sound, self).put([block]) == [True] for block in blocks]


class Claims(Sound):
    def get(self, blocks: Sequence[Block]) -> list[bool]:
        return [self._copy_to(block) if time_left() else True for block in blocks]


class GoesOn(Sound):
    def get(self, blocks: Sequence[Block]) -> list[bool]:
        time_left()
        return MemoryStore.get(self, blocks)


class Loses(Sound):
    """Takes what it did not read for damaged."""

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        hits = super().get(blocks)
        self.drop([block.key for block, hit in zip(blocks, hits, strict=True) if not hit])
        return hits


class WritesOn(Sound):
    """Fills what it did not read in time when it is asked again."""

    late: Sequence[Block] = ()

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        for block in self.late:
            self._copy_to(block)
        hits = super().get(blocks)
        self.late = [block for block, hit in zip(blocks, hits, strict=True) if not hit]
        return hits


class HalfPut(Sound):
    def put(self, blocks: Sequence[Block]) -> list[bool]:
        super().put(blocks)
        return [True] * len(blocks)


def kit(store: type[Any]) -> StoreContract:
    class Kit(StoreContract):
        def open_store(self, payload_bytes: int) -> Any:
            return store()

    return Kit()


GET = "test_a_get_that_is_given_up_ends_and_does_no_harm"
PUT = "test_a_put_that_is_given_up_says_what_is_held"


@pytest.mark.parametrize("test", [GET, PUT])
def test_a_store_that_ends_where_it_is_given_up_passes(test: str) -> None:
    getattr(kit(Sound), test)()


@pytest.mark.parametrize("test", [GET, PUT])
def test_of_a_store_that_never_asks_they_are_skipped(test: str) -> None:
    with pytest.raises(SkipTest, match="never asks"):
        getattr(kit(MemoryStore), test)()


@pytest.mark.parametrize(
    ("store", "test", "says"),
    [
        (Claims, GET, "says True of other bytes"),
        (GoesOn, GET, "goes on"),
        (Loses, GET, "loses blocks"),
        (WritesOn, GET, "after it had returned"),
        (HalfPut, PUT, "not held"),
    ],
)
def test_a_defect_is_found(store: type[Any], test: str, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        getattr(kit(store), test)()
