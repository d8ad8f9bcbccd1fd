"""The conformance kit on the store: `pytest` runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spec.offloading import StoreContext
from tiers.store import TierStore
from tiers.testing import StoreContract
from tiers.testing.template.spec import TemplateSpec
from tiers.testing.template.store import TemplateStore


class TestTemplate(StoreContract):
    shared = True  # two open stores see each other's blocks
    persistent = True  # blocks are there again after close and open
    verifies = False  # True is for tiers of ours: kvtiers finds damage by a checksum of its own
    host_local = True  # as the spec says: other hosts don't find the blocks

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def make_spec(self) -> TemplateSpec:
        return TemplateSpec(path=self.path, capacity=96 * self.payload_bytes)

    def open_store(self, payload_bytes: int) -> TierStore:
        return self.make_spec().open(StoreContext(payload_bytes))

    @contextmanager
    def failing(self, store: TierStore) -> Iterator[None]:
        """Meanwhile every statement of SQL fails; files are SQLite's own, and the kit can't."""
        assert isinstance(store, TemplateStore)
        store._db.set_progress_handler(lambda: 1, 1)
        yield
        store._db.set_progress_handler(None, 1)
