"""Measures how fast a chain's tiers move blocks, once, by real stores and loads."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from spec.chain import ChainSpec
from spec.offloading import HostSpec, OffloadingSpec, StoreContext, StoreSpec
from tiers.errors import KVTiersError
from tiers.host.slot_memory import SlotMemory
from tiers.store import Block, TierStore, batch_blocks
from tiers.timed import timed
from tiers.tuning.machine import TierProfile
from tiers.wrappers.opening import open_guarded

LEAST_BLOCKS = 8
TOTAL_BYTES = 256 << 20
SINGLES = 5
"""Single blocks that are moved for the latency, of which the fastest counts."""


class CannotMeasure(KVTiersError):
    """A tier does not store and load what it should."""


def profile_tiers(
    chain: ChainSpec,
    block_bytes: int,
    live: Collection[str] = (),
    progress: Callable[[str], None] = lambda tier: None,
) -> Iterator[tuple[str, TierProfile]]:
    """Measure each tier: `TOTAL_BYTES` at most (but eight blocks at least) are stored and loaded.
    Yields its name and profile before the next is measured.

    A store is measured in a place of its own beside the engines'. One of the tiers called `live` is
    measured in the engines' place: it keeps the blocks under keys that nobody else has, evicts as
    much for them if it is full, and drops them. `progress` hears the name of each tier. Raises
    TierUnusable, CannotMeasure; the latter for a tier that can't be moved before any is measured.
    """
    count = max(LEAST_BLOCKS, TOTAL_BYTES // block_bytes)
    with ExitStack() as places:
        moved = [_moved(tier, live, places) for tier in chain.tiers]
        for tier in moved:
            progress(tier.tier_name)
            if isinstance(tier, StoreSpec):
                capacity: int | None = getattr(tier, "capacity", None)
                fitting = count if capacity is None else capacity // (2 * block_bytes)
                most = max(LEAST_BLOCKS, min(count, fitting))
                yield tier.tier_name, _store_profile(tier, block_bytes, most)
            elif isinstance(tier, HostSpec):
                yield tier.tier_name, _host_profile(block_bytes, count)


def _moved(tier: OffloadingSpec, live: Collection[str], places: ExitStack) -> OffloadingSpec:
    """The tier where it may be measured; `places` removes what is made for it. Raises
    CannotMeasure."""
    if not isinstance(tier, StoreSpec) or tier.tier_name in live:
        return tier
    notes = tier.notes_folder
    beside = next(filter(Path.is_dir, notes.absolute().parents), None) if notes else None
    if beside is not None:  # on the device that is to be measured
        try:
            made = places.enter_context(TemporaryDirectory(prefix=".kvtiers-bench-", dir=beside))
        except OSError as error:
            raise CannotMeasure(
                f"tier {tier.tier_name}: no folder to measure it can be made in {beside}: "
                f"{error.strerror}"
            ) from error
        if (found := tier.scratch(Path(made))) is not None:
            return found
    name = tier.tier_name
    raise CannotMeasure(
        f"tier {name}: to measure it, hundreds of MiB are stored where engines find their blocks, "
        f"and dropped; a full store evicts as much. Allow that with --live {name}, or write its "
        "link into the profile by hand and leave it out of the chain"
    )


def _store_profile(spec: StoreSpec, block_bytes: int, count: int) -> TierProfile:
    with _opened(spec, block_bytes, count) as (store, blocks):

        def put(batch: Sequence[Block]) -> None:
            _check(all(store.put(batch)), spec, "stored")

        def get(batch: Sequence[Block]) -> None:
            _check(all(store.get(batch)), spec, "loaded")

        singles, rest = blocks[:SINGLES], blocks[SINGLES:]
        single_store = min(timed(partial(put, [block]))[0] for block in singles)
        batch = max(1, min(batch_blocks(block_bytes), len(rest) // spec.loads_at_once))
        batches = [rest[start : start + batch] for start in range(0, len(rest), batch)]
        size = len(rest) * block_bytes
        store_rate = size / timed(lambda: [*map(put, batches)])[0]
        single_load = min(timed(partial(get, [block]))[0] for block in singles)
        alone = size / timed(lambda: [*map(get, batches)])[0]
        with ThreadPoolExecutor(spec.loads_at_once) as threads:
            together = size / timed(lambda: [*threads.map(get, batches)])[0]
    load_rate = max(alone, together)
    return TierProfile(
        load_bandwidth=_rounded(load_rate),
        store_bandwidth=_rounded(store_rate),
        load_latency=_rounded(max(0.0, single_load - block_bytes / alone)),
        store_latency=_rounded(max(0.0, single_store - block_bytes / store_rate)),
    )


@contextmanager
def _opened(
    spec: StoreSpec, block_bytes: int, count: int
) -> Iterator[tuple[TierStore, list[Block]]]:
    """The tier's store, and blocks of random bytes for it, which it drops in the end."""
    namespace = os.urandom(16)
    count += SINGLES
    with (
        closing(SlotMemory(count, block_bytes, pin=False, touch=True)) as memory,
        closing(open_guarded(spec, StoreContext(block_bytes))) as store,
    ):
        memory.rows.copy_(torch.randint(0, 256, memory.rows.shape, dtype=torch.uint8))
        keys = [namespace + number.to_bytes(8, "big") for number in range(count)]
        yield store, [Block(key, memory.payload(slot)) for slot, key in enumerate(keys)]
        store.drop(keys)


def _rounded(figure: float) -> float:
    """A measured figure with the digits that the next measurement confirms."""
    return float(f"{figure:.4g}")


def _check(did_all: bool, spec: StoreSpec, what: str) -> None:
    if not did_all:
        raise CannotMeasure(
            f"tier {spec.tier_name}: not every block was {what}; is it up, and has it room for a "
            "few hundred MiB?"
        )


def _host_profile(block_bytes: int, count: int) -> TierProfile:
    """Copies between host memory and the device, or within host memory where there is none."""
    has_device = torch.cuda.is_available()
    host = torch.zeros((count, block_bytes), dtype=torch.uint8, pin_memory=has_device)
    device = torch.zeros_like(host, device="cuda" if has_device else "cpu")

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)
        if has_device:
            torch.cuda.synchronize()

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        copy(target, source)  # the first touch
        return host.numel() / timed(lambda: copy(target, source))[0]

    return TierProfile(
        load_bandwidth=_rounded(rate(device, host)), store_bandwidth=_rounded(rate(host, device))
    )
