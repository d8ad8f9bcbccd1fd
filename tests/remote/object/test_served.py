"""An engine over an object tier: what it stores lies in packs, and others load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.replay import ReplayEngine, ReplayModel, answer
from tests.support.replay_chains import (
    HYBRID,
    MODEL,
    chain_of,
    close,
    cpu,
    drive,
    encryption,
    measured,
)

pytest.importorskip("obstore")


def _engine(bucket: Path, ranks: int, model: ReplayModel = MODEL, **more: Any) -> ReplayEngine:
    tier = {"type": "object", "url": f"file://{bucket}", **more}
    return ReplayEngine(
        chain_of(cpu(12), tier),
        model,
        num_blocks=24 * len(model.windows),
        prefix_caching=False,
        world_size=ranks,
    )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("encrypted", [False, True])
def test_one_engine_loads_what_another_stored_in_packs(
    tmp_path: Path, ranks: int, encrypted: bool
) -> None:
    more = encryption(tmp_path) if encrypted else {}
    one = _engine(tmp_path / "bucket", ranks, **more)
    drive(one, 3, world_size=ranks)
    one.settle()
    stored = measured(one, "stored_blocks", "object")
    # Of a slow bucket; each rank has a part of each.
    had_no_room = ranks * measured(one, "store_dropped_inflight", "object")
    close(one)
    packs = [file for file in (tmp_path / "bucket").rglob("*") if file.is_file()]
    assert stored > 1.5 * len(packs) / ranks, "blocks of a prompt lie together"
    other = _engine(tmp_path / "bucket", ranks, **more)
    drive(other, 3, world_size=ranks)
    other.settle()
    assert measured(other, "loaded_tokens", "object") > 0
    stored_again = measured(other, "stored_blocks", "object") - had_no_room
    assert stored_again < stored / 2, "they are there already"
    close(other)


def test_a_model_of_several_groups_loads_what_was_stored(tmp_path: Path) -> None:
    """Those of windows lie in packs, too."""
    prompt, stored, loaded = list(range(60)), 0.0, 0.0
    for _ in range(2):
        engine = _engine(tmp_path / "bucket", 1, HYBRID)
        request = engine.add(prompt, 4)
        engine.run()
        assert request.output == answer(HYBRID, prompt, 4)
        engine.settle()
        stored += measured(engine, "stored_blocks", "object")
        loaded = measured(engine, "loaded_tokens", "object")
        close(engine)
    assert loaded > 0
    packs = [file for file in (tmp_path / "bucket").rglob("*") if file.is_file()]
    assert stored > 4 * len(packs), "blocks of each group lie together"
