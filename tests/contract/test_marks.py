"""Marks of blocks, where a prompt has many steps."""

from __future__ import annotations

from typing import SupportsIndex

from hypothesis import given
from hypothesis import strategies as st

from tiers.contract.marks import MediaMark

SIZE = 4


@given(st.lists(st.integers(0, 60)), st.integers(0, 14), st.integers(0, 14))
def test_a_block_has_the_mark_of_the_last_step_that_begins_in_it_or_before(
    tokens: list[int], start: int, stop: int
) -> None:
    steps = [(token, bytes([number + 1])) for number, token in enumerate(sorted(tokens))]
    expected = {
        block: next((mark for at, mark in steps[::-1] if at // SIZE <= block), b"")
        for block in range(start, stop)
    }
    runs = [*MediaMark(steps).spans(range(start, stop), SIZE)]
    assert {block: mark for blocks, mark in runs for block in blocks} == expected
    assert [block for blocks, _ in runs for block in blocks] == [*range(start, stop)]


class Counted(list[tuple[int, bytes]]):
    """Counts the steps that are looked at."""

    seen = 0

    def __getitem__(self, place: SupportsIndex) -> tuple[int, bytes]:  # type: ignore[override]
        self.seen += 1
        return super().__getitem__(place)

    __iter__ = None  # type: ignore[assignment]


def test_a_new_block_looks_at_few_steps_of_a_prompt_that_has_many() -> None:
    """A prompt whose tokens and embeddings take turns has a step for each: a client can send it."""
    steps = Counted((token, b"%d" % token) for token in range(100_000))
    last = 100_000 // SIZE
    assert [*MediaMark(steps).spans(range(last, last + 1), SIZE)] == [
        (range(last, last + 1), b"99999")
    ]
    assert steps.seen < 50
