"""Curves against libCacheSim's LRU, a simulator that others wrote.

It knows no prefixes and no stack distances of prefixes: a request's leading blocks are found first,
then all its blocks are got from tail to head.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import pytest

from tiers.traces.open_trace import open_trace
from tiers.traces.trace import TraceRequest
from tiers.tuning.curve import measure

libcachesim = pytest.importorskip("libcachesim", reason="libcachesim is not installed")
CONVERSATION = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"


def hits(prompts: Sequence[Sequence[int]], size: int) -> int:
    """Blocks that libCacheSim's LRU of so many objects serves."""
    cache, request = libcachesim.LRU(size), libcachesim.Request()
    request.obj_size = 1

    def has(block: int) -> bool:
        request.obj_id = block
        return cache.find(request, False) is not None

    count = 0
    for blocks in prompts:
        count += sum(1 for _ in takewhile(has, blocks))
        for block in reversed(blocks):
            request.obj_id = block
            cache.get(request)
    return count


def made_up(count: int) -> list[list[int]]:
    """Conversations that go on by some blocks each turn, on two shared beginnings."""
    chance = random.Random(5)
    ids = iter(range(100, 10**9))
    beginnings = [[1, 2, 3], [4]]
    going: list[list[int]] = []
    prompts = []
    for _ in range(count):
        if not going or chance.random() < 0.2:
            going.append(list(chance.choice(beginnings)))
        one = going[-1 - min(len(going) - 1, int(chance.expovariate(0.3)))]
        one.extend(next(ids) for _ in range(chance.randrange(6)))
        prompts.append(list(one))
    return prompts


@pytest.mark.parametrize("size", [1, 7, 50, 400, 3000])
def test_a_made_up_trace(size: int) -> None:
    prompts = made_up(2000)
    requests = (TraceRequest(0.0, 16 * len(blocks), 1, blocks) for blocks in prompts)
    assert measure(requests, 16, second_use=False).all.hits(size) == hits(prompts, size) > 0


@pytest.mark.skipif(not CONVERSATION.exists(), reason="mooncake_conversation.jsonl is not there")
@pytest.mark.parametrize("size", [1_709, 34_180])
def test_the_conversation_trace(size: int) -> None:
    trace = open_trace(CONVERSATION)
    prompts = [request.blocks for request in trace]
    assert measure(trace, 512, second_use=False).all.hits(size) == hits(prompts, size)
