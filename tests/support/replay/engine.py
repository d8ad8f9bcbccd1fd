"""ReplayEngine, of whatever an engine may be to a chain."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from spec.chain import ChainSpec
from tests.support.replay.model import ReplayModel
from tests.support.replay.scheduler import CrowdedScheduler, ReplayRequest, StateStep
from tests.support.replay.tables import CachePool, has_null
from tests.support.replay.worker import LocalRank, Rank, Ranks
from tiers.connector.assembly import scheduler_parts, worker_parts
from tiers.connector.multi.multi_scheduler import MultiScheduler, MultiSettings
from tiers.connector.multi.multi_worker import MultiWorker
from tiers.connector.policy.request_table import RequestTable
from tiers.contract.block_copier import OpenCopier
from tiers.contract.engine_info import EngineInfo, LateFacts
from tiers.contract.protocols import BlockEvent
from tiers.contract.weight_reports import Weights
from tiers.gpu.copier import open_copier
from tiers.lab.replay import engine as plain
from tiers.lab.replay.requests import StepOutput

Computed = tuple[StateStep, StepOutput, dict[str, int]]
"""A step in flight that the workers have computed: its results, and the token that it sampled for
each request."""


class ReplayEngine(plain.ReplayEngine):
    """Runs requests over a chain of tiers, or without one (`chain` None).

    `world_size` ranks hold a share of the KV each, and `make_worker` makes each of them. `facts`
    name the model to the namespace, as do `late_facts`. With `kv_events` the connector's events
    gather in `events`. `drops_last`: see `EngineInfo`. `now`: the chain's clock, in seconds.
    `hosts`: those that the scheduler and then each rank report. `weights`: of each rank. `root`:
    see `worker_parts`. With two `steps_in_flight` a step is planned and computed before the last
    one's results are taken in.
    """

    model: ReplayModel
    scheduler: CrowdedScheduler

    def __init__(
        self,
        chain: ChainSpec | None,
        model: ReplayModel | None = None,
        *,
        num_blocks: int = 64,
        batch_tokens: int = 256,
        prefix_caching: bool = True,
        world_size: int = 1,
        make_worker: Callable[..., Rank] = LocalRank,
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
        model = model or ReplayModel()
        info = replace(
            model.engine_info(num_blocks),
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
        self.workers = [
            make_worker(model, num_blocks, rank, open_half) for rank in range(world_size)
        ]
        nothing = (), MultiSettings(RequestTable(info)), (), ""
        parts = nothing if chain is None else scheduler_parts(chain, info, now)
        self._steps_in_flight = steps_in_flight
        self._in_flight: deque[Computed] = deque()
        self.steps = 0
        self.events: list[BlockEvent] = []
        self.closed = False
        super().__init__(model, info, MultiScheduler(*parts), Ranks(self.workers))
        self.num_blocks = self.scheduler.pool.num_free

    def _open_scheduler(self, info: EngineInfo) -> CrowdedScheduler:
        windows = self.model.windows
        pool = CachePool(info.num_blocks, info.caches_prefixes, has_null(windows))
        return CrowdedScheduler(
            self.connector,
            pool,
            self.model.block_tokens,
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
        name: str = "",
        **more: Any,
    ) -> ReplayRequest:
        """Queue a request; `more`: its other fields. Raises ValueError if it can never fit."""
        name, size = name or f"request-{next(self._ids)}", self.model.block_tokens
        asked = list(prompt), max_tokens, size, salt, kv_transfer_params
        request = ReplayRequest(name, *asked, **more)
        blocks = -(-(request.num_tokens + max_tokens) // size)
        needed = blocks * len(self.model.windows)
        if not request.prompt or needed > self.num_blocks:
            raise ValueError(f"a request of {needed} blocks; 1..{self.num_blocks} fit")
        self.scheduler.add(request)
        return request

    @property
    def busy(self) -> bool:
        return bool(super().busy or self._in_flight)

    def step(self) -> bool:
        """Run one step, and take in the oldest in flight; False: it had nothing to compute."""
        computes = False
        if self.scheduler.busy or not self._in_flight:
            step = self.scheduler.plan()
            for work in step.work:
                if len(work.tokens) < step.num_scheduled_tokens[work.request_id]:
                    work.tokens.append(self._in_flight[-1][2][work.request_id])
            self.begin(step)
            output = self.worker.end(step)
            self._in_flight.append((step, output, plain.sampled(step, output.sums)))
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

    def generate(self, *asked: Any, **more: Any) -> ReplayRequest:
        """Run one request to its end; it is asked for as in `add`."""
        request = self.add(*asked, **more)
        self.run()
        return request

    def settle(self) -> None:
        super().settle()
        while self._in_flight:
            self._take_in()

    def reset_cache(self) -> bool:
        """Forget all prefixes, here and in the connector, as after a change of weights; False:
        requests still use some."""
        self.scheduler.pool.forget_all()
        unused = not any(any(request.tables) for request in self.scheduler.requests.values())
        return self.connector.reset_cache() and unused

    def close(self) -> None:
        self.closed = True
        super().close()


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
