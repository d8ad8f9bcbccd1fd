"""When a tier can't take all of a request, it has its head: what is behind a gap is of no use."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spec.chain import ChainSpec
from spec.offloading import OffloadingSpec
from tests.support.clock import Clock
from tests.support.replay import ReplayEngine, ReplayRequest
from tests.support.replay_chains import MODEL, SLOT
from tests.support.slow_store import LONG, SlowSpec, TroubledStore
from tiers.cpu.spec import CpuSpec

MakeEngine = Callable[..., ReplayEngine]
SETTINGS: dict[str, dict[str, float]] = {
    "few slots": {},
    "max_inflight": {"max_inflight": 3 * MODEL.payload_bytes},
    "write_budget": {"write_budget": 20 * MODEL.payload_bytes / 3600},
}


def held(store: TroubledStore, request: ReplayRequest) -> list[bool]:
    """Which of the request's blocks the store has."""
    size = len(request.block_hashes[0])
    keys = {key[16:][:size] for key in store.blocks}
    return [one in keys for one in request.block_hashes]


def assert_head(has: list[bool]) -> int:
    """The blocks that are kept are the first ones; how many."""
    count = sum(has)
    assert has == [True] * count + [False] * (len(has) - count)
    return count


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("retries", [1, 256])
@pytest.mark.parametrize("above", [False, True])
@pytest.mark.parametrize("puts", [1, 2, 3, 5])
def test_what_a_store_has_of_a_request_is_its_head(
    engine: MakeEngine,
    store: TroubledStore,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    retries: int,
    above: bool,
    puts: int,
) -> None:
    """The store takes a batch now and then: in every `puts`th step of the engine."""
    monkeypatch.setattr("tiers.connector.scheduler.tier_stores.RETRIES", retries)
    tiers: list[OffloadingSpec] = [SlowSpec(type="slow").model_copy(update=SETTINGS[setting])]
    if above:
        tiers.insert(0, CpuSpec(type="cpu", capacity=20 * SLOT))
    chain = ChainSpec(version=1, load_when="always", tiers=tuple(tiers), staging=12 * SLOT)
    clock = Clock(100.0)
    made = engine(chain, num_blocks=240, batch_tokens=28, prefix_caching=False, now=clock)
    both = [made.add([n, *LONG[: 60 + 90 * n]], 9) for n in range(2)]
    store.pace.hang("put")
    for step in range(400):
        if step % puts == puts - 1:
            store.pace.resume()
            made.settle()
            store.pace.hang("put")
        clock.now += 120.0
        made.step()
        if not made.scheduler.requests:
            break
    store.pace.resume()
    made.run()
    made.settle()
    counts = [assert_head(held(store, request)) for request in both]
    assert sum(counts) > 0
