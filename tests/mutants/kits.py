"""How the kit opens each store that has mutants. Imports nothing of a store before it is opened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Whatever a child needs and no mutant is of: it is imported once.
import tiers.testing
import tiers.trial  # noqa: F401
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


@contextmanager
def open_kits(stores: set[str]) -> Iterator[dict[str, OpenKit]]:
    """How to open the kit of each of these stores, by name; starts a server if one needs it."""
    kits: dict[str, OpenKit] = {"template": open_template, "disk": open_disk}
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
