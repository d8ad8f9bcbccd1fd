"""Suite inside: a disk of ours as a secondary tier of vLLM's own tiering, beside vLLM's `fs`.

Both under vLLM's own manager of tiers, driven as its connector does, a step each 200 us: requests
store what vLLM's host memory then has, and load what it has no more. A full tier of ours evicts; of
`fs`, which has no capacity, we remove the oldest files, which is not timed.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from bench.disk_peers import VllmFiles, offloading_spec
from bench.main import Scale
from bench.report import Case, Measure
from tiers.disk.slab import slot_bytes
from tiers.disk.spec import DiskSpec
from tiers.records import NamespaceNote

BATCHES = 4
"""Batches that a tier holds."""
PEER = "vLLM fs"
STEP_SECONDS = 0.0002
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Shape:
    """A batch: what is stored or loaded at once."""

    requests: int
    blocks: int
    block_bytes: int

    @property
    def count(self) -> int:
        """Of all blocks."""
        return self.requests * self.blocks

    @property
    def capacity(self) -> int:
        """Bytes that a disk needs for `BATCHES`."""
        return BATCHES * self.count * slot_bytes(self.block_bytes)

    def __str__(self) -> str:
        return f"{self.requests} x {self.blocks} x {self.block_bytes >> 10} KiB"


SHAPES = Shape(4, 16, 2 << 20), Shape(1, 64, 2 << 20), Shape(16, 64, 64 << 10)
SMOKE = (Shape(2, 4, 64 << 10),)


def cases(scale: Scale, stack: ExitStack) -> Iterator[Case]:
    """By the size of blocks and of requests; what a restart keeps; the room that is taken."""
    if not VllmFiles.installed():
        yield Case("inside", "store", "GB/s", None, why="vLLM is not installed")
        return
    folders = (scale.folder / f"{number}" for number in itertools.count())
    for shape in SMOKE if scale.smoke else SHAPES:
        for direct, targets in ((True, (2.0, 1.0)), (False, (None, None))):
            with ExitStack() as inner:
                ours = Tiering(shape, Ours(next(folders), shape), inner)
                theirs = Tiering(shape, Files(next(folders), direct), inner)
                yield from _beside(ours, theirs, "" if direct else ", buffered", targets)
    shape = SMOKE[0] if scale.smoke else SHAPES[0]
    yield from _kept(shape, folders)


def _beside(
    ours: Tiering, theirs: Tiering, how: str, targets: Sequence[float | None]
) -> Iterator[Case]:
    for tiering in (ours, theirs):
        tiering.store(BATCHES)
    moves = ("store", ours.storing(), theirs.storing()), ("load", ours.loading(), theirs.loading())
    for (verb, mine, peer), target in zip(moves, targets, strict=True):
        yield Case(
            "inside",
            f"{verb}, {ours.shape} beside {PEER}{how}",
            "GB/s",
            mine,
            peer=peer,
            peer_name=PEER + how,
            target=target,
            of="peer",
        )


def _kept(shape: Shape, folders: Iterator[Path]) -> Iterator[Case]:
    """Of the blocks that fit, how many the next engine finds; and what room files take."""
    ours = partial(Ours, shape=shape)
    for name, unit, measure, target in (
        ("found after a restart", "of all", _found, 1.0),
        # With its index, the files' heads, and what is being written.
        (f"room for {4 * BATCHES} batches, where {BATCHES} fit", "of capacity", _room, 1.1),
    ):
        mine, peer = (partial(measure, shape, kind, folders) for kind in (ours, Files))
        yield Case(
            "inside",
            name,
            unit,
            mine,
            peer=peer,
            peer_name=PEER,
            target=target,
            of="ours",
            rounds=1,
        )


def _found(shape: Shape, kind: Callable[[Path], Secondary], folders: Iterator[Path]) -> float:
    folder = next(folders)
    with ExitStack() as stack:
        Tiering(shape, kind(folder), stack).store(BATCHES)
    with ExitStack() as stack:
        return Tiering(shape, kind(folder), stack, batches=BATCHES).found()


def _room(shape: Shape, kind: Callable[[Path], Secondary], folders: Iterator[Path]) -> float:
    folder = next(folders)
    with ExitStack() as stack:
        Tiering(shape, kind(folder), stack).store(4 * BATCHES)
    files = (path.stat() for path in folder.rglob("*") if path.is_file())
    return sum(file.st_blocks * 512 for file in files) / shape.capacity


class Secondary:
    """A kind of secondary tier."""

    def make(self, rows: memoryview) -> Any:
        """Return the tier over vLLM's host memory."""
        raise NotImplementedError

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove blocks, where the tier never does so itself."""


class Ours(Secondary):
    """`KVTiersStore` over a disk that has room for `BATCHES`."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self._spec = DiskSpec(path=folder, capacity=shape.capacity)

    def make(self, rows: memoryview) -> Any:
        from tiers.engine.vllm_offloading import KVTiersStore

        spec, engine = cast(Any, offloading_spec()), cast(Any, _Engine())
        return KVTiersStore(spec, rows, "KVTiersStore", store=self._spec, engine=engine)


class Files(Secondary):
    """vLLM's `fs`; `direct`: as it decides itself, else through the page cache."""

    def __init__(self, folder: Path, direct: bool = True) -> None:
        self._folder, self._direct = folder, direct

    def make(self, rows: memoryview) -> Any:
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        spec = cast(Any, offloading_spec())
        self._tier: Any = FileSystemTierManager(spec, rows, "fs", str(self._folder))
        self._tier._use_o_direct &= self._direct
        return self._tier

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            os.unlink(self._tier.file_mapper.get_file_name(key))


class _Engine:
    """What `KVTiersStore` asks of an engine; the weights of this one never change."""

    is_outdated = False

    def namespace(self, seconds: float = 0.0) -> bytes:
        return bytes(16)

    def looked(self) -> Callable[[], bool]:
        return lambda: True

    def note(self, payload_bytes: int) -> NamespaceNote:
        return NamespaceNote("m", "e", "l", 16, payload_bytes, 0, 1, False, False, 0.0, 1)

    def end_step(self) -> None: ...

    def reset(self) -> None: ...


class Tiering:
    """vLLM's manager of tiers over host memory of two batches, and its connector's calls. All that
    is loaded is looked at: raises RuntimeError for a block that is another."""

    def __init__(
        self, shape: Shape, secondary: Secondary, stack: ExitStack, batches: int = 0
    ) -> None:
        """`batches`: that were stored before."""
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
        from vllm.v1.kv_offload.tiering.manager import (
            CPUPrimaryTierOffloadingManager,
            TieringOffloadingManager,
        )

        self.shape, rows = shape, 2 * shape.count
        name = f"kvtiers-bench-{os.getpid()}-{next(_NUMBERS)}"
        size = shape.block_bytes
        region = SharedOffloadRegion(name, rows, None, size, size)
        self._primary: Any = CPUPrimaryTierOffloadingManager(rows, region, "lru", None, False)
        view = self._primary.get_kv_memoryview()
        self._rows = np.asarray(view)
        self._rows[:] = np.frombuffer(os.urandom(size), self._rows.dtype)
        self._secondary, self._batches, self._removed = secondary, batches, 0
        self._manager: Any = TieringOffloadingManager(self._primary, [secondary.make(view)])
        stack.callback(self._close)

    def _close(self) -> None:
        del self._rows
        self._manager.shutdown()

    def storing(self) -> Measure:
        """GB/s of storing new batches."""

        def run() -> float:
            while self._batches - self._removed >= BATCHES:
                for request in self._keys(self._removed):
                    self._secondary.remove(request)
                self._removed += 1
            return self._rate(self.store)

        return run

    def loading(self) -> Measure:
        """GB/s of loading the last batch, which host memory has no more."""

        def run() -> float:
            self._primary.reset_cache()
            return self._rate(partial(self.load, self._batches - 1))

        return run

    def found(self) -> float:
        """The part of the last `BATCHES` that can be loaded."""
        loaded = 0
        for batch in range(self._batches - BATCHES, self._batches):
            self._primary.reset_cache()
            loaded += self.load(batch)
        return loaded / (BATCHES * self.shape.count)

    def _rate(self, move: Callable[[], object]) -> float:
        began = time.perf_counter()
        move()
        return self.shape.count * self.shape.block_bytes / (time.perf_counter() - began) / 1e9

    def _keys(self, batch: int) -> list[list[Any]]:
        """Of each request of a batch: hashes, and the number of their group."""
        count = self.shape.count
        numbers = range(batch * count, (batch + 1) * count)
        keys = [hashlib.sha256(b"%d" % number).digest() + bytes(4) for number in numbers]
        return [keys[at : at + self.shape.blocks] for at in range(0, count, self.shape.blocks)]

    def store(self, batches: int = 1) -> None:
        """Store new batches, one by one."""
        for _ in range(batches):
            for keys in self._keys(self._batches):
                context = self._begin(keys)
                output = self._manager.prepare_store(keys, context)
                for key, row in zip(keys, output.store_spec.chunk_ids, strict=True):
                    self._rows[row, : len(key)] = np.frombuffer(key, self._rows.dtype)
                self._manager.complete_store(keys, context)
                self._manager.on_request_finished(context)
            while self._manager.has_pending_work():
                self._step()
            self._batches += 1

    def load(self, batch: int) -> int:
        """Load a batch; return of how many blocks."""
        waiting = [(self._begin(keys), keys) for keys in self._keys(batch)]
        loaded = 0
        while waiting:
            for request in waiting[:]:
                context, keys = request
                answers = [self._manager.lookup(key, context).name for key in keys]
                if not {"RETRY", "HIT_PENDING"} & {*answers}:
                    held = [k for k, answer in zip(keys, answers, strict=True) if answer == "HIT"]
                    self._look(held, context)
                    loaded += len(held)
                    waiting.remove(request)
            self._step()
        return loaded

    def _look(self, keys: list[bytes], context: Any) -> None:
        rows = self._manager.prepare_load(keys, context).chunk_ids
        if [bytes(self._rows[row, : len(keys[0])]) for row in rows] != keys:
            raise RuntimeError("a block came back as another")
        self._manager.complete_load(keys, context)
        self._manager.on_request_finished(context)

    def _begin(self, keys: Sequence[bytes]) -> Any:
        """A request, which knows the places of all its blocks, as those of vLLM's connector do."""
        from vllm.v1.kv_offload.base import ReqContext

        context: Any = ReqContext(f"{next(_NUMBERS)}")
        self._manager.on_new_request(context)
        for place, key in enumerate(keys, 1):
            context.set_offload_key_position(key, place)
        return context

    def _step(self) -> None:
        self._manager.on_schedule_end(SimpleNamespace(new_req_ids=()))
        time.sleep(STEP_SECONDS)
