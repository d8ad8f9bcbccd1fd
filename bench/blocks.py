"""Throughput against block size: what the suites cpu, gpu, disk and remote measure besides."""

from __future__ import annotations

from collections.abc import Iterator

from bench.main import Scale
from bench.report import Case, Measure

BATCH_BYTES = 64 << 20
SIZES = tuple(64 << 10 + shift for shift in range(8))
"""Bytes of a block: 64 KiB to 8 MiB."""


def sizes(scale: Scale) -> Iterator[tuple[int, int]]:
    """(bytes of a block, blocks of a batch of `BATCH_BYTES`)."""
    for size in SIZES[:1] if scale.smoke else SIZES:
        yield size, 8 if scale.smoke else BATCH_BYTES // size


def both_ways(
    suite: str, line: str, block_bytes: int, store: Measure, load: Measure
) -> Iterator[Case]:
    """Stores and loads of one tier (`line`) with one size of blocks, in GB/s."""
    for verb, measure in (("store", store), ("load", load)):
        case = f"{verb}, {line}, blocks of {block_bytes >> 10} KiB"
        yield Case(suite, case, "GB/s", measure, rounds=3)
