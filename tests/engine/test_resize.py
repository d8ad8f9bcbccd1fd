"""Tiers are made smaller and larger while the engine serves from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.clock import wait_for
from tests.support.replay_chains import MODEL, SLOT, chain_of, disk, measured
from tests.support.resizing import halves, resize
from tiers.lab.replay import ReplayEngine, answer

MakeEngine = Callable[..., ReplayEngine]
PROMPTS = [list(range(start, start + 41)) for start in range(100, 900, 50)]


def ask(engine: ReplayEngine, prompts: list[list[int]], world_size: int = 1) -> None:
    """Ask all at once; the tokens are right."""
    requests = [engine.add(prompt, 4) for prompt in prompts]
    engine.run()
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output == answer(MODEL, prompt, 4, world_size)
    engine.settle()


def test_a_disk_shrinks_to_what_was_used_last_and_grows_beyond_its_start(
    engine: MakeEngine, tmp_path: Path
) -> None:
    chain = chain_of(disk(tmp_path, f"{200 * 2 * SLOT}B"))
    made = engine(chain, num_blocks=400, prefix_caching=False)
    (spec,) = chain.tiers
    ask(made, PROMPTS[:8])
    ask(made, PROMPTS[8:])
    scheduler, _ = halves(made, "disk")

    def used() -> float:
        made.step()
        return measured(made, "used_bytes", "disk")

    assert resize(made, spec, 100 * 2 * SLOT) == []
    wait_for(lambda: 0 < used() <= 100 * 2 * SLOT)
    wait_for(lambda: made.step() or measured(made, "capacity_bytes", "disk") == 100 * 2 * SLOT)
    before = measured(made, "hit_tokens", "disk")
    ask(made, PROMPTS[8:])
    assert measured(made, "hit_tokens", "disk") == before + 8 * 40, "the half used last"
    assert resize(made, spec, 300 * 2 * SLOT) == []
    ask(made, PROMPTS)
    wait_for(lambda: used() > 100 * 2 * SLOT)
    before = measured(made, "hit_tokens", "disk")
    ask(made, PROMPTS)
    assert measured(made, "hit_tokens", "disk") == before + 16 * 40
    (reason,) = resize(made, spec, SLOT)
    assert reason == "capacity 4KiB is less than a block of each rank"
    assert scheduler.get_kv_connector_stats() is None or used() > 100 * 2 * SLOT
