"""What evictors keep below a capacity: a shared directory, and a bucket over a folder of files."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from spec.offloading import StoreSpec
from spec.registry import tier_class
from tests.support.process_worker import fresh
from tests.support.replay import ReplayEngine
from tests.support.replay_chains import MODEL, chain_of, cpu
from tiers.remote.packs.evictor import Evictor, KeptBucket, Pace, Pause
from tiers.remote.packs.lease import WATCH_BEATS, Lease
from tiers.remote.packs.pack import name_of
from tiers.remote.shared import directory_bucket
from tiers.remote.shared.upkeep import DirectoryTerms
from tiers.testing import make_key

SIZE = 1000
"""Bytes of a pack that `fill` puts."""
DAY = 86400


class Place:
    """A place of one kind, at `path`. `paced`: the module that has the pace of its evictors, and
    `terms` of its lease; `renews`: whether a read makes a pack younger."""

    renews: bool

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def paced(self) -> Any:
        raise NotImplementedError

    def bucket(self, clock: Any = time.monotonic) -> Any:
        raise NotImplementedError

    def terms(self) -> Any:
        raise NotImplementedError

    def tier(self, capacity: int | str | None) -> dict[str, Any]:
        """The YAML of its tier."""
        raise NotImplementedError

    def spec(self, capacity: int | None) -> StoreSpec:
        tier = self.tier(capacity)
        spec = tier_class(tier["type"]).model_validate(tier)
        assert isinstance(spec, StoreSpec)
        return spec

    @property
    def pace(self) -> Pace:
        pace: Pace = self.paced.PACE
        return pace

    @property
    def watch_seconds(self) -> float:
        """After these a holder that is silent has lost the lease."""
        return WATCH_BEATS * self.pace.beat

    def hurry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let upkeep be done at once."""
        pace = self.pace._replace(beat=0.01, usual=Pause(0.01, 0), full=Pause(0.01, 0))
        monkeypatch.setattr(self.paced, "PACE", pace)

    def lease(self, clock: Any) -> Lease:
        return Lease(self.terms(), self.pace.beat, clock)

    def keeper(self, capacity: int | None, clock: Any) -> Evictor:
        return Evictor(self.bucket(clock), capacity, self.lease(clock), self.pace, clock)

    def kept(self, capacity: int) -> KeptBucket:
        """Its packs, kept below a capacity by a thread."""
        return KeptBucket(self.bucket(), capacity, self.terms(), self.pace)

    def fill(self, ages: Sequence[float]) -> list[Path]:
        """Put a pack for each of these ages, in seconds."""
        bucket, now = self.bucket(), time.time()
        packs = [self.path / name_of(make_key()) for _ in ages]
        for pack, age in zip(packs, ages, strict=True):
            bucket.put(str(pack.relative_to(self.path)), [bytes(SIZE)])
            os.utime(pack, (now - age, now - age))
        return packs

    def held_bytes(self) -> int:
        """Of all packs."""
        found = (path for path in self.path.glob("?" * 32 + "/*/*") if path.is_file())
        return sum(path.stat().st_size for path in found)

    def engine(self, capacity: str, **more: Any) -> ReplayEngine:
        """An engine over host memory and this."""
        chain = chain_of(cpu(12), {**self.tier(capacity), **more})
        return ReplayEngine(chain, MODEL, num_blocks=24, prefix_caching=False)

    @contextmanager
    def held_elsewhere(self) -> Iterator[None]:
        """Within it another process keeps this and holds its lease; behind it that one has been
        killed."""
        context = fresh()
        holds = context.Event()
        holder = context.Process(target=_hold, args=(self, holds))
        holder.start()
        try:
            assert holds.wait(60)
            yield
        finally:
            holder.kill()
            holder.join()


class SharedDirectory(Place):
    renews = True

    def __init__(self, path: Path) -> None:
        path.mkdir(0o700)
        super().__init__(path)

    @property
    def paced(self) -> Any:
        return directory_bucket

    def bucket(self, clock: Any = time.monotonic) -> Any:
        return directory_bucket.DirectoryBucket(self.path, clock)

    def terms(self) -> Any:
        return DirectoryTerms(str(self.path), 0o700)

    def tier(self, capacity: int | str | None) -> dict[str, Any]:
        return {"type": "shared", "path": self.path, "capacity": capacity}


class FolderBucket(Place):
    """Of obstore's own code, without a server."""

    renews = False

    @property
    def paced(self) -> Any:
        pytest.importorskip("obstore")
        from tiers.remote.object import upkeep as object_upkeep

        return object_upkeep

    def bucket(self, clock: object = None) -> Any:
        return self.spec(None)._bucket(0)  # type: ignore[attr-defined]

    def terms(self) -> Any:
        return self.paced.ObjectTerms(self.bucket())

    def tier(self, capacity: int | str | None) -> dict[str, Any]:
        return {"type": "object", "url": f"file://{self.path}", "capacity": capacity}


KINDS = (SharedDirectory, FolderBucket)


def there(packs: Sequence[Path]) -> list[bool]:
    return [pack.exists() for pack in packs]


def _hold(place: Place, holds: Any) -> None:
    kept = place.kept(10**9)
    while not kept._room.count.round:
        time.sleep(0.01)
    holds.set()
    time.sleep(600)
