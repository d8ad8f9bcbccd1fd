"""Traffic whose best chain is known, since it was made for one reason.

A document is a prompt of full blocks that requests ask for again; times are so far apart that
only what a test is about can be busy.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from tiers.traces.trace import TraceRequest

BLOCK_TOKENS = 16
KV_BYTES = 1000
"""Of a token."""
BLOCK = BLOCK_TOKENS * KV_BYTES


def requests(documents: Iterable[tuple[int, int]], gap: float = 1.0) -> list[TraceRequest]:
    """Requests for documents, each a number and its length in blocks, `gap` seconds apart."""
    return [
        TraceRequest(
            at * gap * 1000,
            blocks * BLOCK_TOKENS + 1,
            1,
            [document << 16 | block for block in range(blocks)],
        )
        for at, (document, blocks) in enumerate(documents)
    ]


def loop(documents: int, blocks: int, count: int, first: int = 0) -> Iterator[tuple[int, int]]:
    """`count` requests for documents in turn: an LRU that is too small for all has none of them."""
    for at in range(count):
        yield first + at % documents, blocks


def once(blocks: int, count: int, first: int = 1 << 20) -> Iterator[tuple[int, int]]:
    """Documents that nobody asks for again."""
    for at in range(count):
        yield first + at, blocks


def mixed(
    *streams: tuple[Iterator[tuple[int, int]], int], seed: int = 0
) -> Iterator[tuple[int, int]]:
    """Streams in one, each as often as its weight says, until the first ends."""
    rng = random.Random(seed)
    names, weights = zip(*streams, strict=True)
    while True:
        (stream,) = rng.choices(names, weights)
        found = next(stream, None)
        if found is None:
            return
        yield found
