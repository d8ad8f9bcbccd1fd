"""A store whose blocks another process puts. Imports little: engines of tests begin by it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spec.offloading import StoreContext, StoreSpec
from tests.support.topologies import wait_until
from tiers.disk.spec import DiskSpec
from tiers.testing import Memory, make_key
from tiers.wrappers.put_process import PutsApart

SIZE = 64 << 10
SITE = StoreContext(SIZE)


def keys(count: int = 3) -> list[bytes]:
    return [make_key() for _ in range(count)]


def put(store: PutsApart, some: Sequence[bytes]) -> list[bool]:
    return store.put(Memory(some, SIZE).fill().readonly())


def spec(path: Path, blocks: int = 200) -> DiskSpec:
    return DiskSpec(path=path / "kv", capacity=blocks * (SIZE + 4096))


def opened(of: StoreSpec) -> PutsApart:
    """A store whose process, if it has one, is open or has ended."""
    store = PutsApart(of.open(SITE), of, SITE, "tier")
    wait_until(lambda: store._process is None or store._process.has_answered())
    return store


def number(store: PutsApart) -> int:
    """The process that puts."""
    assert store._process is not None
    return store._process.number


def in_the_engine(store: PutsApart) -> bool:
    return store._process is None
