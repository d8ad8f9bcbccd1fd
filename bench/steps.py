"""Suite steps: what a step of the engine costs while much is under way and a long prompt waits.

A tier lags behind: thousands of blocks are on their way into it. A prompt of
128k tokens, half in the cpu tier and all in the other, waits for room and is asked about in every
step (`load_policy: stitched`). In each step 16 requests complete a block, and as many are stored.
Other rows have as many requests as an engine may answer at once, and no prompt that waits.

Both halves are real but for the lagging store, which keeps names and no bytes. Steps begin 20 ms
after each other by a clock of our own, so that what is done anew now and then is in the figures:
means over all steps, in time that the engine's thread ran.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.lagging import SMOKE, LaggingSpec, Size, chain_of, worker_step
from bench.main import Scale
from bench.report import Case
from bench.scheduled import Output, Step
from bench.scheduler import HASH_BYTES, NAMESPACE, PAYLOAD, TOKENS, Prompt
from spec.offloading import StoreContext
from tiers.connector.assembly import scheduler_parts, worker_parts
from tiers.connector.multi.multi_connector import MultiConnectorMetadata, MultiWorkerMetadata
from tiers.connector.multi.multi_scheduler import MultiScheduler
from tiers.connector.multi.multi_worker import MultiWorker
from tiers.contract.block_groups import GROUP_BYTES
from tiers.contract.engine_info import EngineInfo
from tiers.contract.messages import (
    JobResult,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    StoreItem,
    StoreJob,
    WorkerHandshake,
)
from tiers.contract.weight_reports import WeightOrders
from tiers.gpu.copier import open_copier
from tiers.lab.replay.requests import CachedRequests, NewRequest
from tiers.store import Block
from tiers.wrappers.opening import open_guarded

STEP_SECONDS = 0.02
FLOW = 16
"""Blocks that a step completes, and as many are stored in it."""
LIMIT_SCHEDULER, LIMIT_WORKER = 2.0, 1.0
"""Milliseconds of a step, with the most under way."""


class Running:
    """Requests that complete a block each in every step."""

    def __init__(self, first: int, count: int, blocks: int) -> None:
        self._prompts = [Prompt(first + number, blocks) for number in range(count)]
        self._done = 0

    def begin(self, chain: Any) -> None:
        """Ask for them, and give them their blocks."""
        for prompt in self._prompts:
            chain.get_num_new_matched_tokens(prompt, 0)
            chain.update_state_after_alloc(prompt, prompt, 0)

    def step(self) -> Step:
        """One more block of each."""
        done, self._done = self._done, self._done + 1
        each = {prompt.request_id: TOKENS for prompt in self._prompts}
        if not done:
            return Step([NewRequest(p.request_id, ([0],), 0) for p in self._prompts], each)
        names, count = [*each], len(each)
        cached = CachedRequests(names, set(), [([done],)] * count, [done * TOKENS] * count)
        return Step([], each, cached)

    def end(self, chain: Any) -> None:
        """They have finished, and leave nothing to offer."""
        for prompt in self._prompts:
            chain.request_finished(prompt, [])


class Answering(Running):
    """Requests that compute a token each in every step. One in `TOKENS` completes a block."""

    def step(self) -> Step:
        """One more token of each."""
        names = [prompt.request_id for prompt in self._prompts]
        computed = [TOKENS + number % TOKENS + self._done for number in range(len(names))]
        self._done += 1
        if self._done == 1:
            new = [NewRequest(name, ([0, 1],), 0) for name in names]
            return Step(new, dict(zip(names, computed, strict=True)))
        before = [tokens - 1 for tokens in computed]
        added: list[tuple[list[int], ...] | None] = [
            ([tokens // TOKENS],) if not tokens % TOKENS and tokens > TOKENS else None
            for tokens in before
        ]
        return Step([], dict.fromkeys(names, 1), CachedRequests(names, set(), added, before))


class Scheduler:
    """The scheduler halves, with stores under way and a prompt that waits."""

    def __init__(self, size: Size, ranks: int, encrypted: Path | None) -> None:
        self._size, self._ranks = size, ranks
        self._now = self._spent = 0.0
        chain, spec, self._store = chain_of(size, encrypted)
        engine = EngineInfo({}, TOKENS, TOKENS, num_blocks=1, world_size=ranks)
        self._chain = MultiScheduler(*scheduler_parts(chain, engine, lambda: self._now))
        self._spaces = [bytes([rank]) + NAMESPACE[1:] for rank in range(ranks)]
        shakes = {r: WorkerHandshake(r, name, PAYLOAD) for r, name in enumerate(self._spaces)}
        self._hear([OffloadingWorkerMetadata(handshakes=shakes) for _ in range(2)])
        self._waiting = Prompt(0, size.blocks)
        self._in_flight: deque[tuple[int, int]] = deque()
        """Jobs of the lagging tier, with how many blocks each has."""
        self._due = 0
        self._first = 1
        self._hold(spec)
        self._flow = self._runners(FLOW, len(size.in_flight) * (size.rounds + 2) * size.steps + 4)

    def _runners(self, count: int, blocks: int) -> Running:
        running = Running(self._first, count, blocks)
        self._first += count
        running.begin(self._chain)
        return running

    def _hold(self, spec: LaggingSpec) -> None:
        """Have the waiting prompt in the store, of all ranks, and its first half in cpu too."""
        guarded = open_guarded(spec, StoreContext(PAYLOAD, self._ranks))
        page = memoryview(bytearray(PAYLOAD))
        for space in self._spaces:
            keys = [space + one + bytes(GROUP_BYTES) for one in self._waiting.block_hashes]
            for start in range(0, len(keys), 64):
                guarded.put([Block(key, page) for key in keys[start : start + 64]])
        half = Prompt(0, self._size.blocks, asked=1)
        half.block_hashes = half.block_hashes[: self._size.blocks // 2]
        half.num_tokens = half.num_prompt_tokens = len(half.block_hashes) * TOKENS + 1
        # The lagging tier has these blocks, so that only cpu stores them.
        self._chain.get_num_new_matched_tokens(half, 0)
        self._chain.update_state_after_alloc(half, half, 0)
        new = NewRequest(half.request_id, half.get_block_ids(), 0)
        orders = self._chain.build_connector_meta(Step([new], {half.request_id: half.num_tokens}))
        self._end([job.job_id for job in orders.metadata[0].reqs_to_store], [])
        self._chain.request_finished(half, [])

    def _end(self, cpu: Sequence[int], lagging: Sequence[int]) -> None:
        """All ranks say that these jobs have ended, and the engine puts together what they say."""
        whole: MultiWorkerMetadata | None = None
        for _ in range(self._ranks):
            ended = [{number: JobResult(1) for number in jobs} for jobs in (cpu, lagging)]
            said = MultiWorkerMetadata(tuple(OffloadingWorkerMetadata(jobs=j) for j in ended))
            began = time.thread_time()
            whole = said if whole is None else whole.aggregate(said)
            self._spent += time.thread_time() - began
        assert whole is not None
        began = time.thread_time()
        self._chain.update_connector_output(Output(whole))
        self._spent += time.thread_time() - began

    def _hear(self, children: Sequence[OffloadingWorkerMetadata]) -> None:
        self._chain.update_connector_output(Output(MultiWorkerMetadata(tuple(children))))

    def fill(self, in_flight: int) -> None:
        """Have so many blocks under way."""
        more = in_flight - sum(blocks for _, blocks in self._in_flight)
        if more <= 0:
            return
        count = min(more, 500)
        running = self._runners(count, -(-more // count))
        for _ in range(-(-more // count)):
            self._step(running, waits=False, ends=0)
        running.end(self._chain)

    def _step(self, running: Running, waits: bool = True, ends: int = FLOW) -> float:
        """Milliseconds of a step."""
        chain = self._chain
        step = running.step()
        self._now += STEP_SECONDS
        began = time.thread_time()
        if waits:
            tokens, _ = chain.get_num_new_matched_tokens(self._waiting, 0)
            assert tokens in (None, self._size.blocks * TOKENS), "all of the prompt is held"
        orders = chain.build_connector_meta(step)
        seconds = time.thread_time() - began
        cpu, lagging = (one.reqs_to_store for one in orders.metadata)
        self._in_flight.extend((job.job_id, len(job.items)) for job in lagging)
        over = self._over(ends)
        self._spent = 0.0
        self._end([job.job_id for job in cpu], over)
        began = time.thread_time()
        chain.get_kv_connector_stats()
        chain.take_events()
        return 1e3 * (seconds + self._spent + time.thread_time() - began)

    def _over(self, blocks: int) -> list[int]:
        """The jobs that have ended once so many blocks more have."""
        self._due += blocks
        over: list[int] = []
        while self._in_flight and self._in_flight[0][1] <= self._due:
            job, of_job = self._in_flight.popleft()
            self._due -= of_job
            over.append(job)
        return over

    def steps(self) -> float:
        """Milliseconds of a step, in the mean."""
        self._look(self._waiting)  # the first look is a figure of its own
        return statistics.fmean(self._step(self._flow) for _ in range(self._size.steps))

    def answers(self) -> float:
        """Milliseconds of a step of requests that answer, in the mean."""
        steps = self._size.steps
        prompts = range(self._first, self._first + self._size.answers)
        self._first = prompts.stop
        running = Answering(prompts.start, len(prompts), steps // TOKENS + 4)
        running.begin(self._chain)
        self._step(running, waits=False)
        milliseconds = statistics.fmean(self._step(running, waits=False) for _ in range(steps))
        running.end(self._chain)
        return milliseconds

    def worst(self) -> float:
        """Milliseconds of the worst step."""
        return max(self._step(self._flow) for _ in range(self._size.steps))

    def _look(self, prompt: Prompt) -> float:
        """Seconds of the worst of the steps that it takes to look a prompt up."""
        worst, tokens = 0.0, None
        while tokens is None:
            time.sleep(STEP_SECONDS)
            began = time.thread_time()
            tokens, _ = self._chain.get_num_new_matched_tokens(prompt, 0)
            worst = max(worst, time.thread_time() - began)
        return worst

    def first_look(self) -> float:
        """Milliseconds, in the worst step, of the first questions about a prompt that the tiers
        hold."""
        self._first += 1
        prompt = Prompt(0, self._size.blocks, asked=self._first)
        seconds = self._look(prompt)
        self._chain.request_finished(prompt, [])
        return 1e3 * seconds

    def close(self) -> None:
        """Close the chain."""
        self._chain.shutdown()


class Worker:
    """A worker's halves, with stores under way."""

    def __init__(self, size: Size) -> None:
        chain, _, self._store = chain_of(size, None)
        self._size = size
        engine = EngineInfo({}, TOKENS, TOKENS, num_blocks=64, world_size=max(size.ranks))
        self._worker = MultiWorker(*worker_parts(chain, engine, open_copier))
        self._worker.register_kv_caches({"layer": torch.zeros(64, PAYLOAD, dtype=torch.uint8)})
        self._store.goes_on.clear()
        self._jobs = self._in_flight = self._steps = 0
        self._random = random.Random(1)

    def _orders(self, count: int) -> MultiConnectorMetadata:
        """Orders to store so many blocks: cpu gathers them, the lagging tier shares the slots."""
        cpu, lagging = OffloadingConnectorMetadata(), OffloadingConnectorMetadata()
        for _ in range(count):
            job, self._jobs = self._jobs, self._jobs + 1
            key = self._random.randbytes(HASH_BYTES)
            cpu.reqs_to_store.append(StoreJob(job, [StoreItem(key, job, job % 64)]))
            lagging.reqs_to_store.append(StoreJob(job, [StoreItem(key, job, None)]))
        self._in_flight += count
        self._steps += 1
        weights = WeightOrders(self._steps, {self._steps - 1: True})
        return MultiConnectorMetadata((cpu, lagging), {}, weights=weights)

    def _step(self, count: int) -> float:
        """Milliseconds of a step."""
        worker, orders = self._worker, self._orders(count)
        began = time.thread_time()
        said = worker_step(worker, orders)
        seconds = time.thread_time() - began
        lagging = said.metadata[1] if said is not None else None
        self._in_flight -= len(lagging.jobs) if lagging is not None else 0
        return 1e3 * seconds

    def fill(self, in_flight: int) -> None:
        """Have so many stores under way."""
        while self._in_flight < in_flight:
            self._step(min(500, in_flight - self._in_flight))

    def steps(self) -> float:
        """Milliseconds of a step, in the mean; the stores that it began are there afterwards."""
        return statistics.fmean(self._step(1) for _ in range(self._size.steps))

    def all_end(self) -> float:
        """Milliseconds of the worst step from the one that finds all stores ended."""
        self._step(0)  # says of the last one that no rank's weights have changed
        self._store.goes_on.set()
        children: Sequence[Any] = self._worker.children
        for child in children:
            child._writer.submit(int).result()  # it does what it was given in order
        worst = 0.0
        while self._in_flight:
            worst = max(worst, self._step(0))
        return worst

    def close(self) -> None:
        """Close the worker."""
        self._store.goes_on.set()
        self._worker.shutdown()


def cases(scale: Scale, stack: ExitStack) -> Iterator[Case]:
    """Steps by how much is under way, in the scheduler and on a worker."""
    size = SMOKE if scale.smoke else Size()
    keys = scale.folder / "keys"
    keys.write_text("ab" * 32 + "\n")
    keys.chmod(0o600)
    one = partial(Case, "steps", unit="ms", of="ours", rounds=size.rounds)
    most = max(size.in_flight)
    for ranks in size.ranks:
        for how, encrypted in (("plain", None), ("encrypted", keys)):
            where = f"scheduler, {ranks} ranks, {how}"
            half = Scheduler(size, ranks, encrypted)
            yield one(case=f"{where}, {size.answers} requests answer: mean", ours=half.answers)
            for count in size.in_flight:
                half.fill(count)
                target = LIMIT_SCHEDULER if count == most else None
                told = f"{where}, {count:,} blocks under way"
                yield one(case=f"{told}: mean", ours=half.steps, target=target)
                if count == most:
                    yield one(case=f"{told}: worst", ours=half.worst)
            yield one(case=f"{where}: the first look at a prompt", ours=half.first_look)
            half.close()
    worker = Worker(size)
    for count in size.in_flight:
        worker.fill(count)
        target = LIMIT_WORKER if count == most else None
        yield one(
            case=f"worker, {count:,} stores under way: mean", ours=worker.steps, target=target
        )
    yield one(case=f"worker, {most:,} stores end at once: worst", ours=worker.all_end, rounds=0)
    worker.close()
