"""A trace of made-up traffic: chats that go on in turns, and documents that are asked about once.

    python -m bench.traffic FILE [--requests N] [--seed N] [--agents]

The same seed gives the same trace, one JSON object a line: timestamp in ms, lengths in tokens, and
an id for each block of 512 tokens, which stands for the block and all before it.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 512
SHARED_BLOCKS = 4
"""Of the instructions with which every chat begins."""


def traffic(requests: int, seed: int = 0, gap: float = 0.4) -> Iterator[dict[str, Any]]:
    """`requests` requests, `gap` seconds apart in the mean.

    Two of three belong to chats: of the last forty chats one goes on, or a new one begins. The rest
    are documents, each asked about once.
    """
    rng = random.Random(seed)
    ids = count()
    shared = [next(ids) for _ in range(SHARED_BLOCKS)]
    chats: list[list[int]] = []
    time = 0.0
    for _ in range(requests):
        time += rng.expovariate(1 / gap)
        if rng.random() < 1 / 3:
            blocks = [next(ids) for _ in range(rng.randrange(5, 60))]
        else:
            if not chats or rng.random() < 0.2:
                chats.append([*shared, *(next(ids) for _ in range(rng.randrange(2, 30)))])
            blocks = rng.choice(chats[-40:])
            blocks += [next(ids) for _ in range(rng.randrange(1, 4))]
        yield _request(time, rng.randrange(20, 400), blocks)


def _request(time: float, answer: int, blocks: Sequence[int]) -> dict[str, Any]:
    return {
        "timestamp": round(time * 1000),
        "input_length": len(blocks) * BLOCK_TOKENS,
        "output_length": answer,
        "hash_ids": list(blocks),
    }


def agents(requests: int, seed: int = 0, abreast: int = 60) -> Iterator[dict[str, Any]]:
    """`requests` requests of so many agents at a time.

    An agent begins with instructions that all share, works on a task in 5 to 60 turns, each of
    which adds what a tool has answered, and asks again when the next tool has: after seconds
    mostly, and after minutes now and then. Then another agent begins.
    """
    rng = random.Random(seed)
    ids = count()
    shared = [next(ids) for _ in range(SHARED_BLOCKS * 4)]
    turns: list[tuple[float, int, int, list[int]]] = []

    def begin(time: float) -> None:
        task = [*shared, *(next(ids) for _ in range(rng.randrange(2, 12)))]
        heapq.heappush(turns, (time, next(ids), rng.randrange(5, 60), task))

    for _ in range(abreast):
        begin(rng.uniform(0, 120))
    for _ in range(requests):
        time, number, left, blocks = heapq.heappop(turns)
        yield _request(time, rng.randrange(20, 200), blocks)
        pause = rng.expovariate(1 / 8) if rng.random() < 0.9 else rng.expovariate(1 / 180)
        if left == 0:
            begin(time + pause)
            continue
        blocks += [next(ids) for _ in range(rng.choice([1, 1, 1, 2, 2, 4, 12]))]
        heapq.heappush(turns, (time + 2 + pause, number, left - 1, blocks))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.traffic", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", type=Path, help="the trace to write")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--agents", action="store_true", help="agents that work on tasks instead")
    options = parser.parse_args(arguments)
    make = agents if options.agents else traffic
    with options.file.open("w", encoding="utf-8") as file:
        for request in make(options.requests, options.seed):
            file.write(json.dumps(request) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
