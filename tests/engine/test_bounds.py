"""Faults that hold a tier back longer, or cost it more, than they should."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from spec.chain import ChainSpec
from tests.support.clock import wait_for
from tests.support.replay import ReplayEngine
from tests.support.replay_chains import MODEL, SLOT, chain_of, cpu, measured, scheduler_of
from tests.support.slow_store import LONG, SlowSpec, TroubledStore, ask
from tiers.connector.scheduler.lookups import Lookup
from tiers.connector.scheduler.store_manager import StoreManager
from tiers.connector.worker.host_slots import HostSlots
from tiers.contract.generation import Generation
from tiers.errors import TierUnavailable
from tiers.gpu.copier import CpuCopier
from tiers.store import Block
from tiers.wrappers.encryption import EncryptedStore, encrypted_bytes
from tiers.wrappers.guard import Guarded


def chain(deadline: str = "200ms", **more: Any) -> ChainSpec:
    tier = SlowSpec.model_validate({"type": "slow", "deadline": deadline})
    return ChainSpec(version=1, load_when="always", tiers=(tier,), staging=256 * SLOT, **more)


def test_a_load_that_was_too_late_costs_the_cpu_tier_no_block(
    engine: Callable[..., ReplayEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = HostSlots.wait_and_verify

    def slow(self: HostSlots, *args: Any) -> list[bool]:
        time.sleep(0.5)  # a loader that waits its turn
        return settle(self, *args)

    made = engine(chain_of(cpu(400), max_wait="100ms"), num_blocks=120, prefix_caching=False)
    ask(made)
    made.settle()
    scheduler = scheduler_of(made)
    held = scheduler.manager.slots_kept()
    with monkeypatch.context() as patched:
        patched.setattr(HostSlots, "wait_and_verify", slow)
        request = made.add(LONG, 4)
        while not measured(made, "load_timeouts", "cpu"):
            made.step()
        left = scheduler.manager.slots_kept()
        made.scheduler.abort(request.request_id)
        made.run()
    assert left == held, "intact blocks were given up"


def test_blocks_of_a_late_load_still_count_to_their_tenants_quota(
    engine: Callable[..., ReplayEngine], store: TroubledStore
) -> None:
    rules = {"small": {"quota": 101 * MODEL.payload_bytes}}
    made = engine(chain(max_wait="300ms", tenants=rules), num_blocks=120, prefix_caching=False)
    ask(made, salt="small")
    made.settle()
    store.pace.hang("get")
    ask(made, salt="small")
    assert measured(made, "load_timeouts") == 1
    store.pace.resume()
    made.settle()
    ask(made, [7, *LONG], salt="small")
    made.settle()
    deadline = time.monotonic() + 5
    while len(store.blocks) > 101 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(store.blocks) <= 101


def test_a_slow_tier_that_works_is_not_called_down_for_a_long_prompt(
    engine: Callable[..., ReplayEngine], store: TroubledStore
) -> None:
    store.pace.delay = lambda verb, num_bytes: 0.012 * num_bytes / SLOT
    made = engine(chain(deadline="1s"), num_blocks=220, prefix_caching=False)
    ask(made)
    made.settle()
    assert measured(made, "stored_blocks") == 101
    assert measured(made, "tier_failures") == 0
    assert measured(made, "writes_up") == 1


def test_the_gauge_says_down_for_as_long_as_the_tier_is_down(
    engine: Callable[..., ReplayEngine], store: TroubledStore
) -> None:
    made = engine(chain(deadline="10s"), num_blocks=120, prefix_caching=False)
    ask(made)
    made.settle()
    store.faults.fail("get", error=TierUnavailable("gone"))
    ask(made)
    assert measured(made, "reads_up") == 0
    time.sleep(1.2)
    for n in range(5):
        ask(made, [n])  # nothing to load
    assert measured(made, "reads_up") == 0


def test_an_index_that_fails_is_left_alone_after_each_try() -> None:
    now = [0.0]
    store = TroubledStore()
    store.faults.fail("peek", error=TierUnavailable("index"))
    guarded: Any = Guarded(store, "disk", retry_after=1.0, clock=lambda: now[0])
    for _ in range(1000):
        guarded.peek([b"k"])
        now[0] += 0.01
    assert store.asked <= 11, "ten seconds, a second or more between tries"


def test_a_damaged_block_that_can_not_be_dropped_costs_the_others_nothing() -> None:
    inner = TroubledStore()
    inner.faults.fail("drop", error=TierUnavailable("read-only"))
    guarded = Guarded(EncryptedStore(inner, [bytes(32)], 4096), "disk")
    keys = [bytes([n]) * 48 for n in range(4)]
    assert all(guarded.put([Block(key, memoryview(bytearray(4096))) for key in keys]))
    name = next(iter(inner.blocks))
    inner.blocks[name] = bytes(encrypted_bytes(4096))
    got = guarded.get([Block(key, memoryview(bytearray(4096))) for key in keys])
    assert sorted(got) == [False, True, True, True]
    assert guarded.health.reads


def test_nobody_waits_for_lookups_that_hang(
    engine: Callable[..., ReplayEngine], store: TroubledStore
) -> None:
    store.slow.indexed = False
    made = engine(chain(max_wait="2s"), num_blocks=120, prefix_caching=False)
    ask(made, LONG[:20])
    made.settle()
    try:
        store.pace.hang("has")
        ask(made, LONG[:20])  # waits, until the deadline has passed too
        began = time.monotonic()
        for n in range(3):
            ask(made, [n, *LONG[:20]])
        waited = time.monotonic() - began
    finally:
        store.pace.resume()
    assert waited < 1.0, "three requests, each of which has waited for a lookup"


def test_lookups_of_requests_that_are_gone_take_no_memory() -> None:
    remote = TroubledStore(indexed=False)
    manager = StoreManager(Guarded(remote, "slow", deadline=0.05), [bytes(16)], Generation())
    remote.pace.hang("has")
    try:
        for _ in range(1000):
            lookup = Lookup()
            manager.prefetch_lookup(lookup, [bytes(34)] * 100)
            lookup.cancel()
            time.sleep(0.0002)
        wait_for(lambda: manager._queue.threads._calls.qsize() < 500)
    finally:
        remote.pace.resume()
        manager.close()


@pytest.mark.parametrize(
    "error",
    # The copier for CUDA needs device memory to put the pages of a block together.
    [torch.OutOfMemoryError("CUDA out of memory"), IndexError("no such block")],
    ids=["memory", "number"],
)
def test_a_gather_that_can_not_be_begun_costs_its_blocks_and_no_more(
    engine: Callable[..., ReplayEngine], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def no_memory(self: CpuCopier, *args: Any) -> Any:
        raise error

    made = engine(chain_of(cpu(400)), num_blocks=120, prefix_caching=False)
    with monkeypatch.context() as patched:
        patched.setattr(CpuCopier, "gather", no_memory)
        try:
            ask(made)
        except (torch.OutOfMemoryError, IndexError):
            made.close()
            pytest.fail(f"the engine ends of it: {error}")
    made.settle()
    ask(made)
    ask(made)
    assert measured(made, "loaded_blocks", "cpu") > 0
