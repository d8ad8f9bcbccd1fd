"""What the soak asks: prompts of a trace, or conversations of its own."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tiers.errors import KVTiersError

MAX_BLOCKS = 120
"""Longest prompt; a trace's longer ones are cut."""


class BadTrace(KVTiersError):
    """A file is no trace."""


def from_trace(path: Path, block_tokens: int) -> Iterator[list[int]]:
    """A trace's prompts, over and over, a few tokens for each of its blocks.

    Each line is a JSON object whose `hash_ids` name the prompt's blocks, an id standing for its
    block and all before it. Raises BadTrace.
    """
    try:
        lines = path.read_text().splitlines()
        requests = [json.loads(line)["hash_ids"][:MAX_BLOCKS] for line in lines]
        prompts = [
            [(7 * number + i) % 50_000 for number in ids for i in range(block_tokens)] + [1]
            for ids in requests
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise BadTrace(f"{path}: not a trace, which has hash_ids in each line ({reason})") from None
    if not prompts:
        raise BadTrace(f"{path}: not a trace: it is empty")
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
