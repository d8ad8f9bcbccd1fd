"""The soak's prompts: those of a trace, or conversations of its own."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

from tiers.errors import TraceError
from tiers.traces.open_trace import open_trace

MAX_BLOCKS = 120
"""Longest prompt; a trace's longer ones are cut."""


def from_trace(path: Path, block_tokens: int) -> Iterator[list[int]]:
    """A trace's prompts, over and over, a few tokens for each of its blocks. Raises TraceError."""
    prompts = [
        [
            (7 * block + i) % 50_000
            for block in request.blocks[:MAX_BLOCKS]
            for i in range(block_tokens)
        ]
        + [1]
        for request in open_trace(path)
    ]
    if not prompts:
        raise TraceError(f"{path}: it has no requests")
    return itertools.cycle(prompts)


def conversations(rng: random.Random, block_tokens: int) -> Iterator[list[int]]:
    """Prompts of conversations that share system prompts and grow, some of which are taken up
    again much later."""
    systems = [[rng.randrange(50_000) for _ in range(rng.randrange(200))] for _ in range(5)]
    open_ones: list[list[int]] = []
    while True:
        if len(open_ones) < 60 or rng.random() < 0.3:
            open_ones.append(list(rng.choice(systems)))
        if len(open_ones) > 200:
            del open_ones[rng.randrange(len(open_ones))]
        turn = rng.choice(open_ones)
        turn += [rng.randrange(50_000) for _ in range(rng.randrange(1, 60))]
        if len(turn) > MAX_BLOCKS * block_tokens:
            open_ones.remove(turn)
        yield list(turn[: MAX_BLOCKS * block_tokens])
