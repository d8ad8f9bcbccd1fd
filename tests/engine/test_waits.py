"""Tiers that hang: a request waits as long as it may, and no block changes behind its back."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from spec.chain import ChainSpec
from spec.offloading import OffloadingSpec
from tests.support.replay import ReplayEngine, ReplayRequest, answer
from tests.support.replay.worker import LocalRank
from tests.support.replay_chains import (
    MODEL,
    SLOT,
    chain_of,
    cpu,
    disk,
    measured,
    scheduler_of,
    total,
)
from tests.support.slow_store import LONG, SlowSpec, TroubledStore, ask
from tiers.cpu.spec import CpuSpec
from tiers.lab.replay.requests import Status, Step, StepOutput


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


class Raising(LocalRank):
    """A rank whose steps may raise, in an engine that goes on. `lost`: of each rank, how many more
    steps raise behind the end of a transfer. `left`: how many raise when their orders are bound, as
    under Model Runner V2."""

    lost: ClassVar[dict[int, int]] = {}
    left = 0
    counted: ClassVar[bool] = False
    """Whether the engine had counted those ends before it raised."""
    quiet: ClassVar[bool] = False
    """Whether rank 1 still loads, as far as it tells."""

    def _take_results(self, finished: set[str]) -> StepOutput:
        return StepOutput() if self.quiet and self._rank else super()._take_results(finished)

    def end(self, step: Step) -> StepOutput:
        if Raising.left:
            Raising.left -= 1
            self.connector.handle_preemptions(step.kv_connector_metadata)
            self.connector.bind_connector_metadata(step.kv_connector_metadata)
            return StepOutput()
        output = super().end(step)
        ended = getattr(output.kv_connector_worker_meta, "metadata", ())
        if any(part is not None and part.jobs for part in ended) and self.lost.get(self._rank):
            self.lost[self._rank] -= 1
            return StepOutput(output.sums, output.finished_recving if self.counted else set())
        return output


def end(made: ReplayEngine, request: ReplayRequest) -> None:
    """Step until a request has ended; it may wait for ever."""
    late = time.monotonic() + 20
    while request.request_id in made.scheduler.requests and time.monotonic() < late:
        made.step()
    assert request.output == answer(MODEL, request.prompt, 1, len(made.workers))


@pytest.mark.fault
@pytest.mark.parametrize("lost", [{0: 1}, {0: 3}, {1: 1}, {0: 2, 1: 1}])
@pytest.mark.parametrize("steps", [1, 2])
def test_what_ended_in_a_step_that_raised_behind_is_reported_again(
    engine: Callable[..., ReplayEngine], tmp_path: Path, lost: dict[int, int], steps: int
) -> None:
    """Once: an engine that counts ranks would else go on while one of them still loads."""
    tiers, ranks = (cpu(20), disk(tmp_path)), 1 + max(lost)
    options: dict[str, Any] = {"world_size": ranks, "steps_in_flight": steps}
    chain = chain_of(*tiers, load_policy="stitched")
    made = engine(chain, prefix_caching=False, make_worker=Raising, **options)
    for what in ("stores", "loads"):
        Raising.lost = {**lost}
        request = made.add(range(100), 1)
        end(made, request)
        made.settle()
        assert not any(Raising.lost.values()), f"no step that {what} has raised"
    assert request.loaded_tokens and not total(made, "load_failures")


@pytest.mark.fault
def test_no_request_runs_while_a_rank_still_loads_though_the_engine_counts_another_twice(
    engine: Callable[..., ReplayEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step raised behind the count, and what had ended in it is reported again."""
    chain = chain_of(cpu(20), disk(tmp_path), load_policy="stitched")
    made = engine(chain, prefix_caching=False, make_worker=Raising, world_size=2)
    made.generate(range(100), 1)
    made.settle()
    request = made.add(range(100), 1)
    monkeypatch.setattr(Raising, "counted", True)
    monkeypatch.setattr(Raising, "quiet", True)
    monkeypatch.setattr(Raising, "lost", {0: 1})
    for _ in range(20):
        made.step()
    assert not Raising.lost[0] and request.loaded_tokens and not request.output
    monkeypatch.setattr(Raising, "quiet", False)
    end(made, request)


@pytest.mark.fault
def test_what_a_step_that_raised_did_not_come_to_is_done_in_the_next(
    engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    """As of Model Runner V2, which leaves out all behind what raised."""
    tiers = cpu(10), disk(tmp_path)
    chain = chain_of(*tiers, load_policy="stitched")
    made = engine(chain, prefix_caching=False, make_worker=Raising)
    made.generate(range(100), 1)
    made.settle()
    request = made.add(range(100), 1)
    Raising.left = 2
    end(made, request)
    assert request.loaded_tokens and not total(made, "load_failures") and not Raising.left


@pytest.mark.fault
@pytest.mark.parametrize("way", ["missed", "left"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_stores_and_fills_of_a_step_that_raised_give_their_slots_back(
    engine: Callable[..., ReplayEngine], tmp_path: Path, way: str, ranks: int
) -> None:
    """The stores fail: what they would read was perhaps never computed."""
    options: dict[str, Any] = {"world_size": ranks, "prefix_caching": False}
    full = engine(chain_of(disk(tmp_path)), **options)
    full.generate(range(100), 1)
    full.settle()
    full.close()
    warmed = chain_of(cpu(80 * ranks), disk(tmp_path), warm={})
    made = engine(warmed, make_worker=Raising, **options)
    request = made.add(range(200, 300), 1)
    ordered = Counter[str]()
    while len(ordered) < 2:
        step = made.scheduler.plan()
        made.begin(step)
        parts = step.kv_connector_metadata.metadata
        ordered += Counter(stores=sum(len(part.reqs_to_store) for part in parts))
        ordered += Counter(fills=sum(len(part.slots_to_fill) for part in parts))
        if way == "left":
            Raising.left = ranks
            made.worker.end(step)
    made.scheduler.abort(request.request_id)
    made.run()
    made.settle()
    for place in range(2):
        tier = scheduler_of(made, place)
        assert not tier.jobs_in_flight and not tier._stores.slots_pinned
    assert tier.pool.in_use == scheduler_of(made).manager.slots_kept()


@pytest.mark.fault
@pytest.mark.parametrize("raised", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_whose_step_raised_before_workers_had_it_is_ordered_again(
    engine: Callable[..., ReplayEngine], tmp_path: Path, raised: int, ranks: int
) -> None:
    """In an engine that goes on, as one whose caller catches that."""
    tiers = cpu(10 * ranks), disk(tmp_path)
    chain = chain_of(*tiers, load_policy="stitched")
    made = engine(chain, prefix_caching=False, world_size=ranks)
    prompt = list(range(100))
    made.generate(prompt, 1)
    made.settle()
    request = made.add(prompt, 1)
    for _ in range(raised):
        step = made.scheduler.plan()
        made.scheduler.give_orders(step)
        assert request.status is Status.LOADING and not step.work
    end(made, request)
    assert request.loaded_tokens and not total(made, "load_failures")
    made.settle()
    assert made.generate(prompt, 1).output == request.output
