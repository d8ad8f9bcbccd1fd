"""ReplayEngine: a whole engine in one object."""

from __future__ import annotations

import functools
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from spec.chain import ChainSpec
from tiers.connector.assembly import scheduler_parts, worker_parts
from tiers.connector.multi.multi_scheduler import MultiScheduler, MultiSettings
from tiers.connector.multi.multi_worker import MultiWorker
from tiers.connector.policy.request_state import RequestTable
from tiers.connector.scheduler.offloading_scheduler import OffloadingScheduler
from tiers.contract.block_copier import OpenCopier
from tiers.contract.engine_info import EngineInfo, LateFacts
from tiers.contract.protocols import BlockEvent
from tiers.contract.stats import Measures, TierStats
from tiers.contract.weight_reports import Weights
from tiers.errors import KVTiersError
from tiers.gpu.copier import open_copier
from tiers.lab.replay.blocks import BlockPool, has_null
from tiers.lab.replay.model import VOCABULARY, ReplayModel
from tiers.lab.replay.requests import ReplayRequest, Step, StepOutput
from tiers.lab.replay.scheduler import ReplayScheduler
from tiers.lab.replay.worker import LocalWorker, Worker

MAX_IDLE_STEPS = 100_000
SETTLE_SECONDS = 60.0
IDLE_SECONDS = 0.0005
"""Pause after a step with nothing to compute: without it this thread would mostly keep the
interpreter from the threads that transfer."""


Computed = tuple[Step, StepOutput, dict[str, int]]
"""A step in flight that the workers have computed: its results, and the token that it sampled for
each request."""


class ReplayEngine:
    """Runs requests over a chain of tiers, or without one (`chain` None).

    `world_size` ranks hold a share of the KV each, and `make_worker` makes each of them. `facts`
    name the model to the namespace, as do `late_facts`. With `kv_events` the connector's events
    gather in `events`. `drops_last`: see `EngineInfo`. `now`: the chain's clock, in seconds.
    `hosts`: those that the scheduler and then each rank report. `weights`: of each rank. `root`:
    see `worker_parts`. With two `steps_in_flight` a step is planned and computed before the last
    one's results are taken in.
    """

    def __init__(
        self,
        chain: ChainSpec | None,
        model: ReplayModel | None = None,
        *,
        num_blocks: int = 64,
        batch_tokens: int = 256,
        prefix_caching: bool = True,
        world_size: int = 1,
        make_worker: Callable[..., Worker] = LocalWorker,
        facts: Mapping[str, str] | None = None,
        open_copier: OpenCopier = open_copier,
        kv_events: bool = False,
        weights_change: bool = False,
        drops_last: bool = False,
        now: Callable[[], float] = time.monotonic,
        late_facts: LateFacts | None = None,
        hosts: Sequence[str] = (),
        weights: Sequence[Weights] = (),
        root: Path = Path("/"),
        steps_in_flight: int = 1,
    ) -> None:
        self._steps_in_flight = steps_in_flight
        self.model = model or ReplayModel()
        info = replace(
            self.model.engine_info(num_blocks),
            facts=dict(facts or {"model": "replay"}),
            world_size=world_size,
            kv_events=kv_events,
            weights_change=weights_change,
            caches_prefixes=prefix_caching,
            drops_last=drops_last,
            step_tokens=batch_tokens,
            late_facts=late_facts,
            host=hosts[0] if hosts else "",
        )
        open_half = functools.partial(_open_worker, chain, info, open_copier, hosts, weights, root)
        workers = [
            make_worker(self.model, num_blocks, rank, open_half) for rank in range(world_size)
        ]
        nothing = (), MultiSettings(RequestTable(info)), (), ""
        parts = nothing if chain is None else scheduler_parts(chain, info, now)
        self._assemble(info, workers, MultiScheduler(*parts))

    def _assemble(
        self, info: EngineInfo, workers: Sequence[Worker], connector: MultiScheduler
    ) -> None:
        """Make an engine of these workers and the chain's other half, which the workers join."""
        self.stats = TierStats()
        self.steps = 0
        self.events: list[BlockEvent] = []
        self.closed = False
        self.workers, self.connector = workers, connector
        handshakes = {rank: worker.handshake() for rank, worker in enumerate(workers)}
        connector.set_xfer_handshake_metadata(handshakes)
        has_null_block = has_null(self.model.windows)
        pool = BlockPool(info.num_blocks, info.caches_prefixes, first=int(has_null_block))
        self.num_blocks = pool.num_free
        self.scheduler = self._open_scheduler(pool, info)
        self._reported: Counter[str] = Counter()
        self._in_flight: deque[Computed] = deque()
        self._ids = itertools.count()

    def _open_scheduler(self, pool: BlockPool, info: EngineInfo) -> ReplayScheduler:
        size, windows = self.model.block_tokens, self.model.windows
        return ReplayScheduler(
            self.connector,
            pool,
            size,
            info.step_tokens,
            windows,
            info.drops_last,
            runs_ahead=self._steps_in_flight > 1,
        )

    def add(
        self,
        prompt: Iterable[int],
        max_tokens: int = 4,
        salt: str = "",
        kv_transfer_params: dict[str, Any] | None = None,
        **more: Any,
    ) -> ReplayRequest:
        """Queue a request; `more`: its other fields. Raises ValueError if it can never fit."""
        name, size = f"request-{next(self._ids)}", self.model.block_tokens
        asked = list(prompt), max_tokens, size, salt, kv_transfer_params
        request = ReplayRequest(name, *asked, **more)
        blocks = -(-(request.num_tokens + max_tokens) // size)
        needed = blocks * len(self.model.windows)
        if not request.prompt or needed > self.num_blocks:
            raise ValueError(f"a request of {needed} blocks; 1..{self.num_blocks} fit")
        self.scheduler.add(request)
        return request

    def step(self) -> bool:
        """Run one step, and take in the oldest in flight; False: it had nothing to compute."""
        computes = False
        if self.scheduler.busy or not self._in_flight:
            step = self.scheduler.plan()
            for work in step.work:
                if len(work.tokens) < step.num_scheduled_tokens[work.request_id]:
                    work.tokens.append(self._in_flight[-1][2][work.request_id])
            self.begin(step)
            self._in_flight.append(self.compute(step))
            computes = bool(step.work)
            self.steps += 1
            if len(self._in_flight) < self._steps_in_flight and self.scheduler.busy:
                return computes
        self._take_in()
        return computes

    def _take_in(self) -> None:
        """Take in the results of the oldest step in flight."""
        step, output, sampled = self._in_flight.popleft()
        self.scheduler.end_step(step, sampled)
        self.scheduler.end_transfers(output)
        self.events += self.connector.take_events()
        self.take_stats()

    def begin(self, step: Step) -> None:
        """Begin a step on all ranks."""
        self.scheduler.give_orders(step)
        for worker in self.workers:
            worker.begin(step)

    def compute(self, step: Step) -> Computed:
        """End a step on all ranks: its tokens are computed."""
        outputs = [worker.end(step) for worker in self.workers]
        sampled = {
            work.request_id: sum(o.sums[work.request_id] for o in outputs) % VOCABULARY
            for work in step.work
            if work.samples
        }
        return step, self.aggregate(outputs), sampled

    def aggregate(self, outputs: list[StepOutput]) -> StepOutput:
        """Merge the outputs of ranks, as an executor does: a load ends once all have reported
        it."""
        whole = StepOutput()
        for output in outputs:
            whole.invalid_block_ids |= output.invalid_block_ids
            whole.failed_recving |= output.failed_recving
            self._reported.update(output.finished_recving)
            ours, theirs = whole.kv_connector_worker_meta, output.kv_connector_worker_meta
            both = ours is not None and theirs is not None
            whole.kv_connector_worker_meta = ours.aggregate(theirs) if both else ours or theirs
        ranks = len(self.workers)
        whole.finished_recving = {name for name, done in self._reported.items() if done == ranks}
        for name in whole.finished_recving:
            del self._reported[name]
        return whole

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
        while self.scheduler.busy or self._in_flight:
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

    def generate(self, *asked: Any, **more: Any) -> ReplayRequest:
        """Run one request to its end; it is asked for as in `add`."""
        request = self.add(*asked, **more)
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
        while self._in_flight:
            self._take_in()

    def reset_cache(self) -> bool:
        """Forget all prefixes, here and in the connector, as after a change of weights; False:
        requests still use some."""
        self.scheduler.pool.forget_all()
        unused = not any(any(request.tables) for request in self.scheduler.requests.values())
        return self.connector.reset_cache() and unused

    def close(self) -> None:
        """Shut both halves down, as an engine does."""
        self.closed = True
        for worker in self.workers:
            worker.close()
        self.connector.shutdown()


def _open_worker(
    chain: ChainSpec | None,
    engine: EngineInfo,
    copier: OpenCopier,
    hosts: Sequence[str],
    weights: Sequence[Weights],
    root: Path,
    rank: int,
) -> MultiWorker:
    if chain is None:
        return MultiWorker(())
    info = replace(engine, rank=rank, host=hosts[rank + 1] if hosts else "")
    if weights:
        info = replace(info, weights=weights[rank])
    return MultiWorker(*worker_parts(chain, info, copier, root))
