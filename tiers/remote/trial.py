"""A trial of a place that hosts share: how long a look-up there takes, and how fast blocks go."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

from spec.fields import format_number
from spec.findings import DoctorFinding
from tiers.remote.deadline import SLOWEST
from tiers.store import Block, TierStore
from tiers.timed import timed

LOOKUPS = 20
MEASURE_SECONDS = 0.5
"""About how long stores are measured; the first ones show how many blocks that takes."""


def look_up(ask: Callable[[], object]) -> tuple[float, str]:
    """Ask `LOOKUPS` times: the seconds of the middle one, and a text with the worst one, too."""
    took = sorted(timed(ask)[0] for _ in range(LOOKUPS))
    middle, worst = (format_number(1e3 * seconds, 2) for seconds in (took[LOOKUPS // 2], took[-1]))
    return took[LOOKUPS // 2], f"{middle} ms, {worst} ms at worst"


def move(
    store: TierStore, keys: Sequence[bytes], size: int, at_once: int
) -> tuple[list[bool], list[bool], bool, str]:
    """Store blocks of `size` bytes, `at_once` at a time, and load them: which were stored last,
    which loaded, whether either is too slow for requests, and a text. Raises as the store does."""
    payload = memoryview(os.urandom(size))
    blocks = [Block(key, payload) for key in keys]
    seconds, stored = timed(partial(store.put, blocks[:at_once]))
    blocks = blocks[: max(at_once, int(MEASURE_SECONDS / seconds))]
    if all(stored) and len(blocks) > at_once:
        seconds, stored = timed(partial(store.put, blocks[at_once:]))
    written = len(stored) * size / seconds
    loads = [Block(block.key, memoryview(bytearray(size))) for block in blocks]
    seconds, loaded = timed(partial(store.get, loads))
    read = len(loaded) * size / seconds
    how = "one at a time" if at_once == 1 else f"{at_once} at once"
    rates = f"it stores {written / 1e9:.2g} GB/s and loads {read / 1e9:.2g} GB/s, {how}"
    return stored, loaded, min(written, read) < SLOWEST, rates


def judged(found: str, is_bad: bool, risk: str, change: str, cost: str) -> DoctorFinding:
    """A warning of a risk, or fine."""
    if is_bad:
        return DoctorFinding("warning", f"{found}: {risk}", change, cost)
    return DoctorFinding("fine", found)
