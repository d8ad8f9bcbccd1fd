"""How far it is from an engine's call to a tier's own table."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.replay_chains import chain_of, disk
from tiers.disk.index.fingerprint_index import FingerprintTable
from tiers.lab.replay import ReplayEngine

MOST_FRAMES = 14
"""One of them is `Reopening`, around every store since any may be lost while it is open."""


def test_a_lookup_meets_the_fingerprints_within_few_frames(
    engine: Callable[..., ReplayEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(chain_of(disk(tmp_path)), prefix_caching=False)
    made.generate(range(40))
    made.settle()
    routes: list[list[str]] = []
    has = FingerprintTable.has

    def noted(self: FingerprintTable, *args: Any) -> Any:
        stack = [f"{Path(f.filename).name}:{f.name}" for f in traceback.extract_stack()[:-1]]
        names = [one.rpartition(":")[2] for one in stack]
        routes.append([*stack[names.index("get_num_new_matched_tokens") :], "FingerprintTable.has"])
        return has(self, *args)

    monkeypatch.setattr(FingerprintTable, "has", noted)
    made.generate(range(40))
    assert routes
    longest = max(routes, key=lambda route: len(route))
    assert len(longest) <= MOST_FRAMES, "\n".join(longest)
