"""How the kit opens each store that has mutants. Imports nothing of a store before it is opened."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# Whatever a child needs and no mutant is of: it is imported once.
import tiers.testing
import tiers.wrappers.opening  # noqa: F401
from tests.mutants.mutant import ROOT
from tests.mutants.run import OpenKit
from tests.support.servers import RedisServer, binaries


def open_template(folder: Path) -> Any:
    """The kit of the store that `kvtiers new-tier` writes, on a folder."""
    from tiers.testing.template.kit import TestTemplate

    kit = TestTemplate()
    kit.path = folder
    return kit


def open_disk(folder: Path) -> Any:
    """The disk tier's, on a folder."""
    from tests.test_store_contract import TestDisk

    kit = TestDisk()
    kit.path = folder / "disk"
    return kit


def open_object(folder: Path) -> Any:
    """The object tier's, over a folder of files."""
    from tests.test_store_contract import TestObject

    kit = TestObject()
    kit.path = folder / "bucket"
    return kit


def open_shared(folder: Path) -> Any:
    """The shared directory's."""
    from tests.test_store_contract import TestShared

    kit = TestShared()
    kit.path = folder / "shared"
    kit.path.mkdir(0o700)
    return kit


class Upkeep:
    """The own tests of a shared directory or a bucket, for what no kit of stores sees: `files`, and
    what both kinds of place have but of the `other`."""

    def __init__(self, other: str, *files: str) -> None:
        named = ("packs/test_lease.py", "packs/test_evictor.py", *files)
        paths = [str(ROOT / "tests" / "remote" / file) for file in named]
        self._chosen = ["-k", f"not {other}", *paths]

    def test_upkeep(self) -> None:
        """Raises AssertionError with the first that fails."""
        failed = _First()
        pytest.main(["-x", "-q", "-n0", "-p", "no:cacheprovider", *self._chosen], plugins=[failed])
        assert not failed.name, failed.name


OF_DIRECTORIES = ("shared/test_upkeep.py", "shared/test_directory_bucket.py")


class _First:
    name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the first failure."""
        if report.failed:
            self.name = self.name or report.nodeid.rpartition("::")[2]


REPLACED = frozenset({"tiers.cpu.eviction", "tiers.host.arc_queues"})
"""What the kit of policies itself compares with: it keeps the sound ones, and the mutant is
imported beside them."""


def open_policy(name: str) -> OpenKit:
    """The kit of one of the policies: lru, arc or admission."""

    def open_kit(folder: Path) -> Any:
        for module in REPLACED & sys.modules.keys():
            del sys.modules[module]
        from tests import test_policy_contract as ours

        kits = {"lru": ours.TestLru, "arc": ours.TestArc, "admission": ours.TestThreshold}
        return kits[name]()

    return open_kit


@contextmanager
def open_kits(stores: set[str]) -> Iterator[dict[str, OpenKit]]:
    """How to open the kit of each of these stores, by name; starts a server if one needs it."""
    kits: dict[str, OpenKit] = {
        "template": open_template,
        "disk": open_disk,
        "object": open_object,
        "shared": open_shared,
        "upkeep": lambda folder: Upkeep("FolderBucket", *OF_DIRECTORIES),
        "capacity": lambda folder: Upkeep("SharedDirectory", "object/test_capacity.py"),
        **{name: open_policy(name) for name in ("lru", "arc", "admission")},
    }
    if "redis" not in stores:
        yield kits
        return
    with RedisServer(next(iter(binaries().values()))) as server:

        def open_redis(folder: Path) -> Any:
            from tests.test_store_contract import TestRedis

            kit = TestRedis()
            kit.url = server.url
            return kit

        yield kits | {"redis": open_redis}
