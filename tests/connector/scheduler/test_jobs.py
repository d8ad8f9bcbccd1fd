"""Jobs under way: what is told of them is counted, not looked for."""

from __future__ import annotations

import random
from typing import Any, cast

from tests.support.fake_requests import FakeRequest
from tiers.connector.policy.block_loader import SharedLoad
from tiers.connector.policy.request_state import RequestState
from tiers.connector.scheduler.jobs import Jobs, PendingLoad, PendingStore
from tiers.connector.scheduler.tier import TierRequest
from tiers.contract.messages import JobResult, LoadItem, LoadJob, StoreItem, StoreJob


class Unlooked(dict[int, Any]):
    """Jobs that nobody may go through."""

    def __iter__(self) -> Any:
        raise AssertionError("a step would cost as much as is under way")

    keys = values = items = __iter__


def test_gauges_say_what_is_under_way_and_go_through_nothing() -> None:
    rng = random.Random(3)
    jobs = Jobs(2)
    jobs._in_flight = Unlooked()
    tier_request = TierRequest(cast(RequestState, FakeRequest()))
    in_flight: dict[int, tuple[str, int, int]] = {}
    for _ in range(300):
        blocks = rng.randrange(1, 5)
        if rng.random() < 0.4:
            items = [LoadItem(b"%d" % n, n, None) for n in range(blocks)]
            numbers = [*range(blocks)]
            load = LoadJob(jobs.next_id(), "request", items, 1.0, b"")
            jobs.begin(PendingLoad(load, tier_request, numbers, numbers, SharedLoad(1)), 0)
            in_flight[load.job_id] = ("loading", blocks, 0)
        elif rng.random() < 0.5:
            stored = [StoreItem(b"%d" % n, n, n) for n in range(blocks)]
            store = StoreJob(jobs.next_id(), stored)
            jobs.begin(PendingStore(store), 0)
            in_flight[store.job_id] = ("storing", blocks, 0)
        elif in_flight:
            job_id = rng.choice([*in_flight])
            kind, blocks, ranks = in_flight.pop(job_id)
            ended = jobs.end(job_id, JobResult(1))
            assert (ended is None) == (ranks == 0), "two ranks must end it"
            if ranks == 0:
                in_flight[job_id] = (kind, blocks, 1)
            assert jobs.end(10**6, JobResult(1)) is None, "a job of before"
        each = [(kind, blocks) for kind, blocks, _ in in_flight.values()]
        assert jobs.gauges(10) == {
            f"{name}_{what}": float(sum(amount if what == "bytes" else 1 for amount in of_kind))
            for name in ("loading", "storing")
            for of_kind in [[10 * blocks for kind, blocks in each if kind == name]]
            for what in ("jobs", "bytes")
        }
