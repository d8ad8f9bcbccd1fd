"""`verify: always`: what changed in host memory is computed anew, never served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from replay_chains import MODEL, chain_of, cpu, disk

from tiers.engine.replay import ReplayEngine, answer

PROMPT = list(range(100, 141))


@pytest.mark.fault(
    tier="cpu",
    fault="a bit flips in host memory (verify: always)",
    outcome="a miss; the block is computed anew and the tier forgets it",
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_flipped_bit_in_host_memory_is_a_miss(
    engine: Callable[..., ReplayEngine], tmp_path: Path, world_size: int
) -> None:
    chain = chain_of(cpu(verify="always"), disk(tmp_path))
    made = engine(chain, prefix_caching=False, world_size=world_size)
    right = answer(MODEL, PROMPT, 4, world_size)
    assert made.generate(PROMPT, 4).output == right
    made.settle()
    memory = made.workers[-1].connector.children[0].worker._host.memory
    memory.rows[:, 7] ^= 0x40
    assert made.generate(PROMPT, 4).output == right
    assert made.stats.data["cpu"]["damaged_blocks"] == 10
    assert made.generate(PROMPT, 4).output == right
    assert made.stats.data["cpu"]["loaded_tokens"] == 40, "stored again, it is loaded again"
