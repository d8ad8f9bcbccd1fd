"""Suite disk: the disk tier beside memcpy, raw loops over one file, and other ways to keep blocks.

Every store measured is a full one: each batch evicts the oldest. Each part has a file or folder
of its own on the file system that `--folder` names. What holds more than its memory runs in a
process with a limit of memory (`bench.squeezed`).
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial

import torch

from bench import lmcache
from bench.blocks import both_ways, sizes
from bench.chain_load import ChainLoads
from bench.cpu import Batch, memcpy
from bench.disk_batch import Bench, chill
from bench.disk_index import index_cases
from bench.disk_peers import VllmFiles
from bench.main import Scale
from bench.report import Case, Measure
from bench.squeezed import BATCHES, Squeezed
from tiers.block import address_of, digest
from tiers.concurrency.numa import bound
from tiers.disk.slab import Io, slot_bytes, supports_direct
from tiers.disk.spec import DiskSpec
from tiers.host.digests import DigestProcess

FILES = "file per block"
IOS: tuple[Io, ...] = "buffered", "direct"
LAUNCHES = 10_000
ODD = 61 * 16 * 576 * 2
"""Bytes of a block of 16 tokens of DeepSeek V3, which are no whole number of pages."""


def cases(scale: Scale, stack: ExitStack) -> Iterator[Case]:
    """Buffered, direct, synced and cold; more than memory; by block size; the index alone."""
    if scale.blocks:
        yield from index_cases(scale)
        return
    count, size = (8, 64 << 10) if scale.smoke else (64, 2 << 20)
    probe = scale.folder / "probe"
    probe.touch()
    direct = supports_direct(probe)
    parts: list[Callable[[Bench], Iterator[Case]]] = [_buffered, _others, _synced, _cold]
    parts += [_direct] if direct else []
    parts += [partial(_through_a_chain, io=io) for io in (IOS if direct else IOS[:1])]
    parts += [partial(_more_than_memory, direct=direct)]
    for part in parts:
        with _bench(scale, count, size, BATCHES) as bench:
            yield from part(bench)
    for io in IOS if direct else IOS[:1]:
        for payload_bytes in (size,) if scale.smoke else (size, ODD):
            with _bench(scale, count, payload_bytes, BATCHES) as bench:
                yield from _beside_an_engine(bench, io, 100 if scale.smoke else LAUNCHES)
    yield from _by_block_size(scale, direct)
    yield from index_cases(scale)


@contextmanager
def _bench(scale: Scale, count: int, payload_bytes: int, batches: int) -> Iterator[Bench]:
    """In a folder that goes with it: what one part holds is the next one's room, and no longer
    the kernel's to write."""
    folder = scale.folder / "disk"
    folder.mkdir()
    try:
        with ExitStack() as stack:
            yield Bench(folder, count, payload_bytes, batches, stack)
    finally:
        shutil.rmtree(folder)


def _case(
    bench: Bench,
    name: str,
    target: float | None,
    ours: Measure | None,
    limit: Measure | None = None,
    peer: Measure | None = None,
    why: str = "",
    peer_name: str = "",
) -> Case:
    if peer_name:
        name = f"{name} beside {peer_name}"
    return Case(
        "disk",
        f"{name}, {bench.count} x {bench.payload_bytes >> 10} KiB",
        "GB/s",
        ours,
        limit,
        peer,
        peer_name=peer_name,
        target=target,
        of="peer" if peer_name else "limit",
        why=why,
    )


def _buffered(bench: Bench) -> Iterator[Case]:
    tier, files, copy = bench.tier("buffered"), bench.files(), memcpy(bench.num_bytes)
    store, load = bench.rate(tier.store), bench.rate(tier.load)
    raw = bench.raw(direct=False)
    into = bench.rate(lambda: raw.store(bench.payloads))
    out = bench.rate(lambda: raw.load(bench.payloads))
    yield _beside_raw_loop(_case(bench, "store, buffered", 0.75, store, copy), into)
    yield _beside_raw_loop(_case(bench, "warm load, buffered", 0.85, load, copy), out)
    peer = bench.rate(lambda: files.store(bench.payloads))
    yield _case(bench, "store, buffered", 4.0, store, peer=peer, peer_name=FILES)
    peer = bench.rate(lambda: files.load(bench.payloads))
    yield _case(bench, "warm load", 1.0, load, peer=peer, peer_name=FILES)


def _beside_raw_loop(case: Case, raw: Measure) -> Case:
    """A case held against memcpy, with what the system's page cache leaves of that."""
    return replace(case, peer=raw, peer_name="raw loop")


def _others(bench: Bench) -> Iterator[Case]:
    """What users have today, where it is installed."""
    tier = bench.tier("buffered")
    ours = bench.rate(tier.store), bench.rate(tier.load)
    with ExitStack() as stack:
        if VllmFiles.installed():
            vllm = VllmFiles(bench.place(), bench.count, bench.payload_bytes, bench.batches)
            stack.callback(vllm.close)
            for _ in range(bench.batches):
                vllm.store()
            theirs = bench.rate(vllm.store, before=vllm.make_room), bench.rate(vllm.load)
            yield from _other(bench, "vLLM fs", ours, theirs)
        else:
            yield from _other(bench, "vLLM fs", ours, None, "vLLM is not installed")
        if lmcache.installed():
            folder = bench.place()
            other = lmcache.LMCacheDisk(folder, bench.count, bench.payload_bytes, bench.batches)
            stack.callback(other.close)
            for _ in range(bench.batches):
                other.store()
            theirs = bench.rate(other.store), bench.rate(other.load)
            yield from _other(bench, lmcache.NAME, ours, theirs)
        else:
            yield from _other(bench, lmcache.NAME, ours, None, lmcache.ABSENT)


def _other(
    bench: Bench,
    name: str,
    ours: tuple[Measure, Measure],
    theirs: tuple[Measure, Measure] | None,
    why: str = "",
) -> Iterator[Case]:
    for what, target, our, number in (("store", 4.0, ours[0], 0), ("warm load", 1.0, ours[1], 1)):
        peer = theirs[number] if theirs else None
        # Without the other there is nothing to learn from ours, which has rows of its own.
        mine = our if theirs else None
        yield _case(bench, what, target, mine, peer=peer, peer_name=name, why=why)


def _more_than_memory(bench: Bench, direct: bool) -> Iterator[Case]:
    """Loads at random from all that is held, and replacement."""
    with ExitStack() as stack:
        why = "" if direct else "this file system has no direct I/O"
        ours: Squeezed | None = None
        if direct:
            try:
                folder = bench.place()
                folder.mkdir()
                ours = Squeezed(folder, bench.count, bench.payload_bytes, stack)
            except OSError as error:
                why = str(error)
        for verb, name in (("load", "random load"), ("store", "replacement")):
            for other, limit in ((" raw", True), (" files", False)):
                mine = ours.measure(verb) if ours else None
                theirs = ours.measure(verb + other) if ours else None
                what = f"{name}, more than memory"
                if limit:
                    yield _case(bench, what, 0.9, mine, theirs, why=why)
                else:
                    yield _case(bench, what, 1.4, mine, peer=theirs, peer_name=FILES, why=why)


def _by_block_size(scale: Scale, direct: bool) -> Iterator[Case]:
    """Few batches: only steady state is asked for."""
    for size, count in sizes(scale):
        for io in IOS if direct else IOS[:1]:
            with _bench(scale, count, size, 4) as bench:
                tier = bench.tier(io)
                store, load = bench.rate(tier.store), bench.rate(tier.load)
                yield from both_ways("disk", f"disk, {io}", size, store, load)


def _direct(bench: Bench) -> Iterator[Case]:
    tier, raw = bench.tier("direct"), bench.raw(direct=True)
    limit = bench.rate(lambda: raw.store(bench.payloads))
    yield _case(bench, "store, direct", 0.9, bench.rate(tier.store), limit)
    limit = bench.rate(lambda: raw.load(bench.payloads))
    yield _case(bench, "load, direct", 0.9, bench.rate(tier.load), limit)
    yield from _synced(bench, "direct")


def _beside_an_engine(bench: Bench, io: Io, launches: int) -> Iterator[Case]:
    """Small operations, as an engine's thread launches in an eager step, beside stores, and beside
    the checksums that gathered blocks get first: whoever has the interpreter's lock keeps that
    thread waiting. It has a processor of its own, as on a machine of many."""
    first, *rest = sorted(os.sched_getaffinity(0))
    with bound(frozenset(rest)), closing(DigestProcess(bench.payload_bytes)) as another:
        work: dict[str, Callable[[], object]] = {
            f"stores, {io},": bench.tier(io).store,
            f"stores by another process, {io},": bench.tier(io, apart=True).store,
        }
        if io == IOS[0]:
            addresses = [*map(address_of, bench.payloads)]
            work["checksums"] = lambda: [*map(digest, bench.payloads)]
            work["checksums by another process"] = lambda: another.digests(addresses)
        for name, one in work.items():
            yield Case(
                "disk",
                f"an engine's launches, {launches:,}, beside {name} of {bench.payload_bytes:,} B",
                "ms",
                partial(_launches, launches, first, one),
                limit=partial(_launches, launches, first, None),
                target=0.8,
            )


def _launches(count: int, processor: int, beside: Callable[[], object] | None) -> float:
    """Milliseconds that they take on this processor, beside work on others."""
    small, is_over = torch.zeros(8), threading.Event()

    def go_on() -> None:
        while beside is not None and not is_over.is_set():
            beside()

    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(go_on)
        try:
            with bound(frozenset([processor])):
                began = time.perf_counter()
                for _ in range(count):
                    small.add_(1)
                return 1e3 * (time.perf_counter() - began)
        finally:
            is_over.set()
            going.result()


def _synced(bench: Bench, io: Io = "buffered") -> Iterator[Case]:
    tier, raw = bench.tier(io, "sync"), bench.raw(direct=io == "direct")
    limit = bench.rate(lambda: raw.store(bench.payloads, sync=True))
    yield _case(bench, f"synced store, {io}", 0.9, bench.rate(tier.store), limit)


def _through_a_chain(bench: Bench, io: Io) -> Iterator[Case]:
    """A whole load, copy into the paged KV included, beside what the store does."""
    with ExitStack() as stack:
        batch = Batch(bench.count, bench.payload_bytes, stack)
        capacity = 2 * bench.count * slot_bytes(bench.payload_bytes)
        spec = DiskSpec(path=bench.place(), capacity=capacity, io=io)
        chain = ChainLoads(spec, batch.paged, batch.blocks, bench.payload_bytes)
        stack.callback(chain.close)
        name = f"load end to end, {io} (limit: the store's)"
        # From the page cache the one waits for memory as the other does.
        target = 0.9 if io == "direct" else None
        yield _case(bench, name, target, bench.rate(chain.load), bench.rate(bench.tier(io).load))


def _cold(bench: Bench) -> Iterator[Case]:
    tier, raw = bench.tier("buffered"), bench.raw(direct=False)
    ours = bench.rate(tier.load, before=lambda: chill(*tier.path.glob("slab-*.dat")))
    limit = bench.rate(lambda: raw.load(bench.payloads), before=lambda: chill(raw.path))
    yield _case(bench, "cold load, buffered", 0.9, ours, limit)
