"""Curves against exact replay: no difference at any size, whatever the trace."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tiers.errors import TraceError
from tiers.traces.open_trace import open_trace
from tiers.traces.trace import TraceRequest
from tiers.tuning.curve import PrefixStack, measure

CONVERSATION = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"
Prompts = list[Sequence[int]]


class Cache:
    """LRU by the book: a request's leading blocks that are there are hits; then those to be stored
    are touched from tail to head."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def leading(self, blocks: Sequence[int]) -> int:
        return next((i for i, one in enumerate(blocks) if one not in self._blocks), len(blocks))

    def touch(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._size:
            self._blocks.popitem(last=False)


def replayed(prompts: Iterable[Sequence[int]], size: int) -> int:
    cache = Cache(size)
    hits = 0
    for blocks in prompts:
        hits += cache.leading(blocks)
        cache.touch(blocks)
    return hits


def replayed_from_second_use(prompts: Iterable[Sequence[int]], size: int, memory: int) -> int:
    cache, used_once, used_again = Cache(size), Cache(memory), Cache(memory)
    hits = 0
    for blocks in prompts:
        stored = blocks[: max(used_once.leading(blocks), used_again.leading(blocks))]
        hits += cache.leading(blocks)
        cache.touch(stored)
        used_again.touch(stored)
        used_once.touch(blocks)
    return hits


def request(blocks: Sequence[int]) -> TraceRequest:
    return TraceRequest(0.0, 16 * len(blocks) + 3, 1, blocks)


def of_tree(branches: list[list[int]]) -> Prompts:
    """Prompts whose ids stand for prefixes: the path through a tree, by the branch taken."""
    ids: dict[tuple[int, ...], int] = {}
    return [
        [ids.setdefault(tuple(path[: depth + 1]), len(ids)) for depth in range(len(path))]
        for path in branches
    ]


def answered(blocks: Sequence[int]) -> TraceRequest:
    """The last third of the blocks are the answer's."""
    of_prompt = blocks[: len(blocks) - len(blocks) // 3]
    return request(of_prompt)._replace(answer_blocks=blocks[len(of_prompt) :])


PATHS = st.lists(st.integers(0, 2), max_size=7)
LONG = st.tuples(st.integers(0, 2), st.integers(1, 30)).map(lambda one: [one[0]] * one[1])
TRACES = st.lists(PATHS | LONG, max_size=50).map(of_tree)


@settings(max_examples=100, deadline=None)
@given(TRACES)
def test_no_difference_from_replay_at_any_size(prompts: Prompts) -> None:
    curves = measure(map(request, prompts), 16)
    distinct = len({block for blocks in prompts for block in blocks})
    assert curves.distinct == distinct
    assert curves.second_use is not None
    for size in range(distinct + 2):
        assert curves.all.hits(size) == replayed(prompts, size)
        expected = replayed_from_second_use(prompts, size, distinct + 1)
        assert curves.second_use.hits(size) == expected
    assert curves.all.references == sum(map(len, prompts))
    assert curves.all.hits(curves.all.useful) == curves.all.hits(distinct)
    if curves.all.useful:
        assert curves.all.hits(curves.all.useful - 1) < curves.all.hits(distinct)


@pytest.fixture(autouse=True)
def _trim_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make short traces go through what long ones need."""
    monkeypatch.setattr("tiers.tuning.curve.SLACK", 2)


@settings(max_examples=50, deadline=None)
@given(TRACES)
def test_answers_are_stored_and_are_no_references(prompts: Prompts) -> None:
    requests = [answered(blocks) for blocks in prompts]
    curves = measure(requests, 16)
    assert curves.second_use is not None
    assert curves.all.references == sum(len(one.blocks) for one in requests)
    for size in (1, 4, 9, 99):
        cache, later, used = Cache(size), Cache(size), Cache(1000)
        hits = hits_later = 0
        for blocks, one in zip(prompts, requests, strict=True):
            hits += cache.leading(one.blocks)
            cache.touch(blocks)
            hits_later += later.leading(one.blocks)
            later.touch(blocks[: used.leading(blocks)])
            used.touch(blocks)
        assert (curves.all.hits(size), curves.second_use.hits(size)) == (hits, hits_later)


@settings(max_examples=50, deadline=None)
@given(TRACES)
@example([[]] * 15 + [[0], [0]])
def test_halves_sum_up(prompts: Prompts) -> None:
    curves = measure(map(request, prompts), 16)
    if curves.halves is None:
        assert len(prompts) < 2
        return
    first, second = curves.halves
    assert first.requests + second.requests == len(prompts)
    assert abs(first.requests - second.requests) <= max(1, len(prompts) // 4)
    for size in (0, 1, 5, 50):
        assert first.hits(size) == replayed(prompts[: first.requests], size)
        assert first.hits(size) + second.hits(size) == curves.all.hits(size)


def test_requests_that_touched_nothing_last_are_forgotten() -> None:
    stack = PrefixStack()
    for _ in range(20_000):
        stack.touch([-1, 0])
        assert len(stack._records) <= 2 * (len(stack) + 10)


@pytest.mark.parametrize(
    "prompts",
    [
        [[1, 2, 3], [4, 2]],
        [[1, 2, 3], [4, 5, 3]],
    ],
    ids=["another parent", "behind an unknown one"],
)
def test_ids_of_single_blocks_are_refused(prompts: Prompts) -> None:
    with pytest.raises(TraceError, match="an id must stand for its block and all blocks before"):
        measure(map(request, prompts), 16)


@given(st.lists(st.lists(st.integers(0, 9), unique=True), max_size=30))
def test_ids_that_make_no_sense_never_break_it(prompts: Prompts) -> None:
    try:
        curves = measure(map(request, prompts), 16)
    except TraceError:
        return
    assert 0 <= curves.all.hits(4) <= curves.all.references


@pytest.mark.skipif(not CONVERSATION.exists(), reason="mooncake_conversation.jsonl is not there")
def test_the_conversation_trace() -> None:
    # What is expected was found by replaying the trace, at these sizes.
    trace = open_trace(CONVERSATION)
    prompts = [request.blocks for request in trace]
    curves = measure(trace, trace.header.block_tokens)
    assert (curves.all.references, curves.distinct) == (276_491, 170_899)
    assert round(curves.all.ratio(170_899), 4) == 0.3819
    assert curves.second_use is not None
    for size in (1_709, 34_180):
        assert curves.all.hits(size) == replayed(prompts, size)
    assert curves.second_use.hits(8_545) == replayed_from_second_use(prompts, 8_545, 170_899)
