"""Engines of one model that share nothing say so when they open a tier."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from spec.offloading import StoreContext
from tiers.connector.worker.namespace_notes import NamespaceNotes, describe
from tiers.disk.spec import DiskSpec


@pytest.mark.parametrize(
    ("model", "ranks", "rank", "warns"),
    [
        ("org/model", 1, 0, True),
        ("org/model", 2, 0, False),
        ("org/model", 4, 1, False),  # rank 0 does
        ("org/other", 1, 0, False),
    ],
)
def test_a_folder_with_kv_of_another_tensor_parallel_size_is_named_with_the_cost(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    model: str,
    ranks: int,
    rank: int,
    warns: bool,
) -> None:
    caplog.set_level(logging.WARNING)
    spec = DiskSpec(path=tmp_path, capacity=1 << 20)
    spec.open(StoreContext(4096)).close()
    of_two = describe({}, "org/model", 16, 40960, ranks=2)
    NamespaceNotes(spec, of_two).keep(bytes(16), lasts=True)
    assert not caplog.messages
    mine = NamespaceNotes(spec, describe({}, model, 16, 81920, rank, ranks))
    mine.keep(b"1" * 16, lasts=True)
    mine.keep(b"2" * 16, lasts=False)  # a generation's
    said = [line for line in caplog.messages if "rank(s)" in line]
    assert len(said) == warns, "once"
    if said:
        assert "KV of org/model from engines of 2 rank(s), and this one has 1" in said[0]
        assert "5KiB a token and rank" in said[0]
