"""Time to the first token with `load_when: sooner`, against `always` and against computing all.

    python -m bench.load_when [--rounds 9] [--tokens 512 1024 2048] [--json FILE]

The replay engine, with a model that needs real time for each token it computes, over stores in
memory behind links of 10 MB/s to 10 GB/s. All prompts were stored before. In each round every
engine answers each prompt once, engines taking turns; a time is the sum over the prompts of one
round, of which the table shows the median. The first round warms up and is shown apart: there
`sooner` has measured nothing yet.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.throttled import Link, ThrottledSpec
from spec.chain import ChainSpec, LoadWhen
from tiers.host.slot_memory import slot_stride
from tiers.lab.replay import ReplayEngine, ReplayModel, answer
from tiers.store import TierStore
from tiers.testing import MemoryStore

MODEL = ReplayModel(layers=2, width=256, block_tokens=64, forward_seconds=100e-6)
"""4 KiB of KV and at least 100 microseconds a token: in a second it computes less than 40 MB."""
BATCH_TOKENS = 512
LATENCY = 0.0005
BANDWIDTHS = (10e6, 30e6, 100e6, 300e6, 1e9, 3e9, 10e9)
WHEN: tuple[LoadWhen, ...] = ("always", "sooner")


class Tier(NamedTuple):
    """A link, in bytes per second, and whether the store behind it is indexed on this host."""

    bandwidth: float
    indexed: bool = True

    def __str__(self) -> str:
        unit, scale = ("GB/s", 1e9) if self.bandwidth >= 1e9 else ("MB/s", 1e6)
        return f"{self.bandwidth / scale:g} {unit}{'' if self.indexed else ' remote'}"


def cases(bandwidths: Sequence[float]) -> Iterator[tuple[Tier, ...]]:
    """Chains to measure: one tier; one whose lookups pass the link too; a slow one over a fast."""
    for bandwidth in bandwidths:
        yield (Tier(bandwidth),)
    for bandwidth in bandwidths:
        yield (Tier(bandwidth, indexed=False),)
    for bandwidth in bandwidths[:3]:
        yield Tier(bandwidth), Tier(max(bandwidths))


def make_prompts(tokens: Sequence[int]) -> list[list[int]]:
    """A prompt of each length, with no common prefix."""
    return [[number, *range(1, length)] for number, length in enumerate(tokens)]


def open_engine(chain: ChainSpec | None, prompts: Sequence[list[int]]) -> ReplayEngine:
    """An engine that keeps nothing itself."""
    blocks = 2 + max(map(len, prompts)) // MODEL.block_tokens
    return ReplayEngine(
        chain, MODEL, num_blocks=blocks, batch_tokens=BATCH_TOKENS, prefix_caching=False
    )


def make_chain(when: LoadWhen, tiers: Sequence[Tier], store: TierStore, staging: int) -> ChainSpec:
    """A chain of throttled tiers, all over one store."""
    chain = ChainSpec(
        version=1,
        load_when=when,
        staging=staging,
        tiers=tuple(ThrottledSpec(type="throttled", indexed=tier.indexed) for tier in tiers),
    )
    for spec, tier in zip(chain.tiers, tiers, strict=True):
        assert isinstance(spec, ThrottledSpec)
        spec.behind(Link(tier.bandwidth, LATENCY), store)
    return chain


def fill(store: TierStore, prompts: Sequence[list[int]], staging: int) -> None:
    """Store all prompts."""
    engine = open_engine(make_chain("always", [Tier(1e12)], store, staging), prompts)
    for prompt in prompts:
        engine.generate(prompt, 1)
        engine.settle()
    engine.close()


def time_round(engine: ReplayEngine, prompts: Sequence[list[int]], right: list[list[int]]) -> float:
    """Seconds to the first token, summed over the prompts; every answer must be right."""
    seconds = 0.0
    for prompt, expected in zip(prompts, right, strict=True):
        began = time.perf_counter()
        request = engine.generate(prompt, 1)
        seconds += time.perf_counter() - began
        assert request.output == expected, "wrong KV was served"
        engine.settle()
    return seconds


def measure(
    tiers: Sequence[Tier], prompts: Sequence[list[int]], right: list[list[int]], rounds: int
) -> dict[str, Any]:
    """One row: milliseconds of each engine, the median of the rounds after the first."""
    store = MemoryStore()
    staging = 2 * sum(map(len, prompts)) // MODEL.block_tokens * slot_stride(MODEL.payload_bytes)
    fill(store, prompts, staging)
    engines = {"recompute": open_engine(None, prompts)}
    for when in WHEN:
        engines[when] = open_engine(make_chain(when, tiers, store, staging), prompts)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(rounds + 1):
        for name, engine in engines.items():
            times[name].append(1000 * time_round(engine, prompts, right))
    for engine in engines.values():
        engine.close()
    medians = {name: statistics.median(taken[1:]) for name, taken in times.items()}
    best = min(medians["recompute"], medians["always"])
    return {
        "tiers": " over ".join(map(str, tiers)),
        **{name: round(taken, 1) for name, taken in medians.items()},
        "mean": round(statistics.mean(times["sooner"][1:]), 1),
        "first_round": round(times["sooner"][0], 1),
        "ratio": round(medians["sooner"] / best, 3),
        "times": {name: [round(one, 2) for one in taken] for name, taken in times.items()},
    }


def print_row(row: dict[str, Any]) -> None:
    """A row as a line of the table."""
    print(
        f"{row['tiers']:<22} {row['recompute']:>10} {row['always']:>8} {row['sooner']:>9} "
        f"{row['ratio']:>6.2f} {row['mean']:>8} {row['first_round']:>12}",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.load_when", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=9, help="after the one that warms up")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048], help="prompts")
    parser.add_argument("--bandwidths", type=float, nargs="+", default=BANDWIDTHS, help="bytes/s")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args(arguments)
    prompts = make_prompts(options.tokens)
    right = [answer(MODEL, prompt, 1) for prompt in prompts]
    print("milliseconds to the first tokens; ratio: sooner to the better of the other two")
    print(
        f"{'tiers':<22} {'recompute':>10} {'always':>8} {'sooner':>9} {'ratio':>6} {'mean':>8} "
        f"{'first round':>12}"
    )
    rows = []
    for tiers in cases(options.bandwidths):
        rows.append(measure(tiers, prompts, right, options.rounds))
        print_row(rows[-1])
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
