"""A request that waits for room is answered from what was said before: that may be late, and is
never wrong KV."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spec.chain import ChainSpec
from tests.support.replay import ReplayEngine, ReplayRequest, answer
from tests.support.replay_chains import MODEL, SLOT, cpu, measured
from tests.support.slow_store import LONG, SlowSpec, TroubledStore, ask
from tiers.connector.scheduler.store_manager import StoreManager
from tiers.cpu.spec import CpuSpec

MakeEngine = Callable[..., ReplayEngine]


class PromptSpec(SlowSpec):
    is_prompt = True


def crowded(engine: MakeEngine, *above: CpuSpec) -> tuple[ReplayEngine, ReplayRequest]:
    """An engine whose tier has LONG, which waits until another request has ended."""
    tier = PromptSpec.model_validate({"type": "slow"})
    chain = ChainSpec(version=1, load_when="always", tiers=(*above, tier), staging=300 * SLOT)
    made = engine(chain, num_blocks=110, batch_tokens=500, prefix_caching=False)
    ask(made)
    made.settle()
    made.add([1, *LONG[:200]], 100)
    made.step()
    waiting = made.add(LONG, 4)
    for _ in range(3):
        made.step()
    assert not waiting.tables, "there is no room for it"
    return made, waiting


def assert_right(made: ReplayEngine, waiting: ReplayRequest) -> None:
    made.run()
    made.settle()
    assert waiting.output == answer(MODEL, LONG, 4, 1)


def test_what_is_there_is_loaded_in_the_end(engine: MakeEngine, store: TroubledStore) -> None:
    made, waiting = crowded(engine)
    assert_right(made, waiting)
    assert measured(made, "loaded_tokens") == 100 * MODEL.block_tokens


def test_what_went_while_it_waited_is_computed(
    engine: MakeEngine, store: TroubledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoreManager, "CHECKS", 0.0)  # nobody learns of it before the load
    made, waiting = crowded(engine)
    store.blocks.clear()
    assert_right(made, waiting)
    assert measured(made, "load_failures") > 0


def test_what_cpu_evicts_while_it_waits_is_no_failure(
    engine: MakeEngine, store: TroubledStore
) -> None:
    made, waiting = crowded(engine, CpuSpec.model_validate(cpu(110)))
    store.blocks.clear()
    evicted = measured(made, "evictions", "cpu")
    while not waiting.tables:
        made.step()
    assert measured(made, "evictions", "cpu") > evicted, "of its own blocks"
    assert_right(made, waiting)
    assert measured(made, "load_failures", "cpu") == 0
