"""ReplayEngine: a whole engine in one object."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence

from tiers.connector.multi.multi_scheduler import MultiScheduler
from tiers.connector.scheduler.offloading_scheduler import OffloadingScheduler
from tiers.contract.engine_info import EngineInfo
from tiers.contract.stats import Measures, TierStats
from tiers.errors import KVTiersError
from tiers.lab.replay.blocks import BlockPool, BlockTables
from tiers.lab.replay.model import VOCABULARY, ReplayModel
from tiers.lab.replay.requests import ReplayRequest, Step
from tiers.lab.replay.scheduler import ReplayScheduler
from tiers.lab.replay.worker import Worker

MAX_IDLE_STEPS = 100_000
SETTLE_SECONDS = 60.0
IDLE_SECONDS = 0.0005
"""Pause after a step with nothing to compute: without it this thread would mostly keep the
interpreter from the threads that transfer."""


class ReplayEngine:
    """Runs requests with the two halves of a chain, of which the worker has the other one."""

    def __init__(
        self, model: ReplayModel, info: EngineInfo, connector: MultiScheduler, worker: Worker
    ) -> None:
        self.model, self.connector, self.worker = model, connector, worker
        self.stats = TierStats()
        connector.set_xfer_handshake_metadata(dict(worker.handshakes()))
        self.scheduler = self._open_scheduler(info)
        self._ids = itertools.count()

    def _open_scheduler(self, info: EngineInfo) -> ReplayScheduler:
        pool = BlockPool(info.num_blocks, info.caches_prefixes)
        tables = BlockTables(pool, info.block_tokens)
        return ReplayScheduler(self.connector, tables, info.step_tokens)

    @property
    def busy(self) -> bool:
        """Whether another step is needed."""
        return self.scheduler.busy

    def step(self) -> bool:
        """Run one step; False: it had nothing to compute."""
        step = self.scheduler.plan()
        self.begin(step)
        output = self.worker.end(step)
        self.scheduler.end_step(step, sampled(step, output.sums))
        self.scheduler.end_transfers(output)
        self.take_stats()
        return bool(step.work)

    def begin(self, step: Step) -> None:
        self.scheduler.give_orders(step)
        self.worker.begin(step)

    def take_stats(self) -> Mapping[str, Measures]:
        """The chain's measures since the last call, which `stats` sums."""
        stats = self.connector.get_kv_connector_stats() or TierStats()
        self.stats.aggregate(stats)
        return stats.data

    def run(self) -> None:
        """Step until every request has ended and every short transfer is over.

        Raises RuntimeError, naming the requests, when nothing moves any more.
        """
        idle = 0
        while self.busy:
            if self.step():
                idle = 0
                continue
            idle += 1
            time.sleep(IDLE_SECONDS)
            if idle > MAX_IDLE_STEPS:
                stuck = [
                    f"{one.request_id}: {one.status.name}, {one.num_computed_tokens}"
                    f"/{one.num_tokens} tokens"
                    for one in self.scheduler.requests.values()
                ]
                raise RuntimeError("\n".join(["the engine is stuck:", *stuck]))

    def generate(self, prompt: Sequence[int], max_tokens: int) -> ReplayRequest:
        name, size = f"request-{next(self._ids)}", self.model.block_tokens
        request = ReplayRequest(name, list(prompt), max_tokens, size)
        self.scheduler.add(request)
        self.run()
        return request

    def settle(self) -> None:
        """Step until no transfer is in flight, also of what needs no wait. Raises KVTiersError."""
        deadline = time.monotonic() + SETTLE_SECONDS
        tiers = [one for one in self.connector.children if isinstance(one, OffloadingScheduler)]
        while any(tier.jobs_in_flight for tier in tiers):
            if not self.step():
                time.sleep(IDLE_SECONDS)
            if time.monotonic() > deadline:
                raise KVTiersError("transfers do not end: the log above says of which tier")

    def close(self) -> None:
        """Shut both halves down, as an engine does."""
        self.worker.close()
        self.connector.shutdown()


def sampled(step: Step, sums: Mapping[str, int]) -> dict[str, int]:
    """The token that a step samples for each request, of the sums over what it sees."""
    return {
        work.request_id: sums[work.request_id] % VOCABULARY for work in step.work if work.samples
    }
