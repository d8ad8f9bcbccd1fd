"""`verify: always`: what changed in host memory is computed anew, never served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.replay import ReplayEngine, answer
from tests.support.replay_chains import (
    MODEL,
    chain_of,
    cpu,
    damage_disk,
    disk,
    encryption,
    measured,
)

PROMPT = list(range(100, 141))


@pytest.mark.fault
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_flipped_bit_in_host_memory_is_a_miss(
    engine: Callable[..., ReplayEngine], tmp_path: Path, world_size: int
) -> None:
    chain = chain_of(cpu(verify="always"), disk(tmp_path))
    made = engine(chain, prefix_caching=False, world_size=world_size)
    right = answer(MODEL, PROMPT, 4, world_size)
    assert made.generate(PROMPT, 4).output == right
    made.settle()
    worker: Any = made.workers[-1]
    memory = worker.connector.children[0]._host.memory
    memory.rows[:, 7] ^= 0x40
    assert made.generate(PROMPT, 4).output == right
    assert measured(made, "damaged_blocks", "cpu") == 10
    made.settle()
    assert made.generate(PROMPT, 4).output == right
    assert measured(made, "loaded_tokens", "cpu") == 40, "stored again, it is loaded again"


@pytest.mark.parametrize("encrypted", [False, True])
def test_damage_in_a_store_is_counted(
    engine: Callable[..., ReplayEngine], tmp_path: Path, encrypted: bool
) -> None:
    more = encryption(tmp_path) if encrypted else {}
    made = engine(chain_of(disk(tmp_path / "disk", **more)), prefix_caching=False)
    right = answer(MODEL, PROMPT, 4, 1)
    assert made.generate(PROMPT, 4).output == right
    made.settle()
    damage_disk(tmp_path / "disk")
    assert made.generate(PROMPT, 4).output == right
    assert measured(made, "damaged_blocks", "disk") >= 10
    made.settle()
    assert made.generate(PROMPT, 4).output == right
    assert measured(made, "loaded_tokens", "disk") == 40, "stored again, it is loaded again"
