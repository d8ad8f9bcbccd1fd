"""Tiers that hang: a request waits as long as it may, and no block changes behind its back."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spec.chain import ChainSpec
from spec.offloading import OffloadingSpec
from tests.support.replay import ReplayEngine, answer
from tests.support.replay_chains import MODEL, SLOT, chain_of, cpu, disk, measured, total
from tests.support.slow_store import LONG, SlowSpec, TroubledStore, ask
from tiers.cpu.spec import CpuSpec
from tiers.lab.replay.requests import Status


def chain(*above: OffloadingSpec, max_wait: Any = "300ms", **settings: Any) -> ChainSpec:
    tier = SlowSpec.model_validate({"type": "slow", "deadline": "200ms", **settings})
    return ChainSpec(
        version=1, load_when="always", tiers=(*above, tier), max_wait=max_wait, staging=256 * SLOT
    )


@pytest.mark.fault
def test_a_load_that_hangs_is_given_up_and_never_arrives_later(
    engine: Callable[..., ReplayEngine], store: TroubledStore
) -> None:
    made = engine(chain(), num_blocks=120, prefix_caching=False)
    ask(made)
    made.settle()
    store.pace.hang("get")
    ask(made)
    assert measured(made, "load_timeouts") == 1
    # Other requests own the paged blocks now, into which the load would have gone.
    others = [made.add([7 * n + t for t in range(300)], 40) for n in range(1)]
    made.step()
    store.pace.resume()
    made.run()
    for other in others:
        assert other.output == answer(MODEL, other.prompt, 40, 1)


@pytest.mark.fault
def test_what_has_arrived_is_used(
    engine: Callable[..., ReplayEngine], store: TroubledStore
) -> None:
    made = engine(chain(), num_blocks=120, prefix_caching=False)
    ask(made)
    made.settle()
    store.pace.hang("get", after=1)
    ask(made)
    assert measured(made, "loaded_tokens") == 64 * MODEL.block_tokens
    assert measured(made, "load_failures") == 36


@pytest.mark.fault
def test_nobody_is_asked_of_a_tier_whose_reads_hang_until_they_work_again(
    engine: Callable[..., ReplayEngine], store: TroubledStore
) -> None:
    made = engine(chain(), num_blocks=120, prefix_caching=False)
    ask(made)
    made.settle()
    assert measured(made, "reads_up") == 1
    store.pace.hang("get")
    ask(made)
    while measured(made, "reads_up"):  # the worker's thread may notice after the request has ended
        made.step()
    asked = store.asked
    for _ in range(3):
        ask(made)
    assert measured(made, "load_timeouts") == 1, "one request has waited, not each"
    assert store.asked - asked < 100, "what is asked is whether to store"
    store.pace.resume()
    while measured(made, "reads_up") == 0:
        ask(made, LONG[:20])
    ask(made)
    assert measured(made, "loaded_tokens") >= 100 * MODEL.block_tokens


@pytest.mark.fault
def test_writes_that_hang_hold_back_neither_answers_nor_reads_nor_other_tiers(
    engine: Callable[..., ReplayEngine], store: TroubledStore
) -> None:
    made = engine(
        chain(CpuSpec.model_validate(cpu(400)), max_inflight=8 * MODEL.payload_bytes),
        num_blocks=120,
        prefix_caching=False,
    )
    ask(made, LONG[:40])
    store.pace.hang("put")
    for n in range(8):
        ask(made, [n, *LONG[:80]])
    assert measured(made, "store_dropped_inflight") > 0
    assert measured(made, "storing_bytes") <= 8 * MODEL.payload_bytes
    while measured(made, "writes_up"):
        ask(made, LONG[:4])
    assert measured(made, "reads_up") == 1
    ask(made, [9, *LONG[:80]])
    assert measured(made, "store_dropped_down") > 0
    assert measured(made, "stored_blocks", "cpu") >= 9 * 20
    store.pace.resume()


def test_a_tier_is_given_what_two_requests_had(
    engine: Callable[..., ReplayEngine], store: TroubledStore
) -> None:
    made = engine(chain(store_threshold=2, deadline="30s"), num_blocks=120, prefix_caching=False)
    ask(made)
    assert not store.blocks and measured(made, "store_deferred") == 101
    ask(made)
    made.settle()
    assert len(store.blocks) == 101


@pytest.mark.fault
@pytest.mark.parametrize("raised", [1, 3])
def test_a_load_whose_step_raised_before_workers_had_it_is_ordered_again(
    engine: Callable[..., ReplayEngine], tmp_path: Path, raised: int
) -> None:
    """In an engine that goes on, as one whose caller catches that."""
    tiers = cpu(10), disk(tmp_path)
    made = engine(chain_of(*tiers, load_policy="stitched"), prefix_caching=False)
    prompt = list(range(100))
    made.generate(prompt, 1)
    made.settle()
    request = made.add(prompt, 1)
    for _ in range(raised):
        step = made.scheduler.plan()
        made.scheduler.give_orders(step)
        assert request.status is Status.LOADING and not step.work
    late = time.monotonic() + 20
    while made.scheduler.requests and time.monotonic() < late:
        made.step()
    assert request.output == answer(MODEL, prompt, 1)
    assert request.loaded_tokens and not total(made, "load_failures")
    made.settle()
    assert made.generate(prompt, 1).output == request.output
