"""Suite scheduler: what a prompt of 128k tokens costs the engine's thread.

The scheduler halves of a chain are real (keys, host pool, disk index, policy, orders); every
transfer succeeds at once and moves nothing. Hashes are new objects in each request, as an
engine's are. Figures are time that the calling thread ran, so that what else the machine does
is not in them; the disk's index is in memory throughout.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.main import Scale
from bench.report import Case, Measure
from bench.scheduled import Output, Step, all_done
from bench.throttled import Link, ThrottledSpec
from spec.chain import ChainSpec
from spec.offloading import OffloadingSpec, StoreContext
from tiers.connector.assembly import scheduler_parts
from tiers.connector.multi.multi_connector import MultiWorkerMetadata
from tiers.connector.multi.multi_scheduler import MultiScheduler
from tiers.contract.block_groups import GROUP_BYTES
from tiers.contract.engine_info import EngineInfo
from tiers.contract.messages import OffloadingWorkerMetadata, WorkerHandshake
from tiers.cpu.spec import CpuSpec
from tiers.disk.disk_store import DiskStore
from tiers.disk.index.edit import Entry, index_key
from tiers.disk.slab import slot_bytes
from tiers.disk.spec import DiskSpec
from tiers.host.slots import ALIGNMENT, slot_stride
from tiers.lab.replay.requests import NewRequest
from tiers.testing import MemoryStore

TOKENS = 16
HASH_BYTES = 32
NAMESPACE = b"n" * 32
PAYLOAD = ALIGNMENT
STEP = 0.02
"""Seconds between two steps of the engine."""
ON_DISK_ONLY = 20
"""Prompts that the CPU tier does not have; the rest of what is on disk it has too."""

FEW = 20
"""Prompts that a median is of."""


@dataclass(frozen=True)
class Size:
    """`blocks` of a prompt; how many `prompts` are resident in all, how many are `asked` for."""

    blocks: int = 8192
    prompts: int = 122
    asked: int = 100


SMOKE = Size(blocks=64, prompts=ON_DISK_ONLY + 4, asked=3)


class Prompt:
    """A prompt of full blocks, number `number`, as connectors see a request and its blocks."""

    def __init__(self, number: int, blocks: int, asked: int = 0) -> None:
        data = random.Random(number).randbytes(blocks * HASH_BYTES)
        self.request_id = f"{number}.{asked}"
        self.block_hashes = [
            data[start : start + HASH_BYTES] for start in range(0, len(data), HASH_BYTES)
        ]
        self.num_tokens = self.num_prompt_tokens = blocks * TOKENS + 1
        self.num_computed_tokens = 0
        self._table = list(range(blocks))

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Any blocks will do: nothing is copied."""
        return (self._table,)


def timed(times: dict[str, float], name: str, call: Callable[[], object]) -> object:
    """Make a call; note the seconds that it ran."""
    began = time.thread_time()
    result = call()
    times[name] = time.thread_time() - began
    return result


class Halves:
    """The scheduler halves of a chain."""

    def __init__(self, tiers: tuple[OffloadingSpec, ...], blocks: int, **more: Any) -> None:
        """`more`: other keys of the chain."""
        staging = 4 * blocks * slot_stride(PAYLOAD)
        chain = ChainSpec(version=1, load_when="always", staging=staging, tiers=tiers, **more)
        engine = EngineInfo({}, TOKENS, TOKENS, num_blocks=1)
        self.chain = MultiScheduler(*scheduler_parts(chain, engine))
        self.promote = True
        """Whether what was loaded is stored."""
        handshake = WorkerHandshake(0, NAMESPACE, PAYLOAD)
        self._hear([OffloadingWorkerMetadata(handshakes={0: handshake}) for _ in tiers])

    def run(self, prompt: Prompt) -> dict[str, float]:
        """Decide, load what is there, store the rest; seconds of each call, of the longest step
        where a decision takes several, and tokens found."""
        times: dict[str, float] = {}
        chain = self.chain
        tokens = self._decide(prompt, times)
        if not self.promote:
            chain.disable_store(prompt)
        new = NewRequest(prompt.request_id, prompt.get_block_ids(), tokens)
        step = Step([new], {prompt.request_id: prompt.num_tokens - tokens})
        timed(times, "alloc", lambda: chain.update_state_after_alloc(prompt, prompt, tokens))
        began = time.thread_time()
        orders = chain.build_connector_meta(step)
        times["meta"] = time.thread_time() - began
        self._hear([all_done(one) for one in orders.metadata])
        chain.request_finished(prompt, [])
        times["found"] = tokens
        return times

    def _decide(self, prompt: Prompt, times: dict[str, float]) -> int:
        longest, tokens = 0.0, None
        while tokens is None:
            began = time.thread_time()
            tokens, _ = self.chain.get_num_new_matched_tokens(prompt, 0)
            longest = max(longest, time.thread_time() - began)
            if tokens is None:
                time.sleep(STEP)
        times["decide"] = longest
        return tokens

    def _hear(self, children: Sequence[OffloadingWorkerMetadata]) -> None:
        self.chain.update_connector_output(Output(MultiWorkerMetadata(tuple(children))))


def enter(store: DiskStore, prompts: Iterator[Prompt]) -> None:
    """Put prompts into a disk tier's index, without their bytes."""
    for prompt in prompts:
        with store._folder.edit() as edit:
            for block_hash in prompt.block_hashes:
                key = index_key(NAMESPACE + block_hash + bytes(GROUP_BYTES))
                edit.publish(key, Entry(edit.claim(slot_bytes(PAYLOAD)), PAYLOAD, bytes(16)))


def resident_bytes() -> int:
    """Memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * ALIGNMENT


class World:
    """A chain of cpu over disk with all prompts in it, and how much memory the CPU tier took."""

    def __init__(self, size: Size, folder: Path) -> None:
        self._size = size
        self._in_cpu = size.prompts - ON_DISK_ONLY
        blocks = size.blocks * size.prompts
        disk = DiskSpec(capacity=2 * blocks * slot_bytes(PAYLOAD), path=folder / "disk")
        cpu = CpuSpec(capacity=blocks * slot_stride(PAYLOAD))
        self.halves = Halves((cpu, disk), size.blocks)
        self._store = disk.open(StoreContext(PAYLOAD))
        enter(self._store, (Prompt(n, size.blocks) for n in range(size.prompts)))
        fingerprints = self._store._folder.fingerprints
        fingerprints.peek([bytes(16)])
        while fingerprints._renewing:
            time.sleep(0.01)
        before = resident_bytes()
        for number in range(ON_DISK_ONLY, size.prompts):
            self.halves.run(Prompt(number, size.blocks))
        self.bytes_per_block = (resident_bytes() - before) / (self._in_cpu * size.blocks)
        self._asked = 0

    def in_cpu(self, asked: int) -> dict[str, list[float]]:
        """Seconds of each call, for so many prompts that the CPU tier has."""
        return self._ask(ON_DISK_ONLY, self._in_cpu, asked, found=True)

    def on_disk(self) -> dict[str, list[float]]:
        """The same for prompts that only the disk has."""
        # They would come to the CPU tier by the end of their load, and be found there.
        self.halves.promote = False
        times = self._ask(0, ON_DISK_ONLY, self._size.asked, found=True)
        self.halves.promote = True
        return times

    def nowhere(self) -> dict[str, list[float]]:
        """The same for prompts that no tier has."""
        self.halves.promote = False
        times = self._ask(self._size.prompts, self._size.asked, self._size.asked, found=False)
        self.halves.promote = True
        return times

    def _ask(self, first: int, prompts: int, asked: int, found: bool) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {}
        for number in range(asked):
            self._asked += 1
            prompt = Prompt(first + number % prompts, self._size.blocks, self._asked)
            row = self.halves.run(prompt)
            assert bool(row.pop("found")) == found, "a prompt is not where it should be"
            for name, seconds in row.items():
                times.setdefault(name, []).append(seconds)
        return times

    def close(self) -> None:
        """Close the chain and the disk."""
        self.halves.chain.shutdown()
        self._store.close()


class Remote:
    """A chain of one store behind a network, which has nothing."""

    def __init__(self, size: Size) -> None:
        tier = ThrottledSpec(type="throttled", indexed=False).behind(Link(1e9, 1e-3), MemoryStore())
        self.halves = Halves((tier,), size.blocks)
        self._size = size
        self._asked = 0

    def ask(self) -> float:
        """Microseconds of this thread, in the median, to begin a lookup and to take its answer;
        the keys are made before, when the request arrives."""
        times = [self._one() for _ in range(self._size.asked)]
        return 1e6 * statistics.median(times)

    def _one(self) -> float:
        self._asked += 1
        chain, prompt = self.halves.chain, Prompt(self._asked, self._size.blocks)
        chain._requests.keys(chain._requests.of(prompt))
        total: dict[str, float] = {}
        timed(total, "begin", lambda: chain.on_new_request(prompt))
        answer: object = (None, False)
        while answer == (None, False):
            time.sleep(1e-3)
            answer = timed(total, "poll", lambda: chain.get_num_new_matched_tokens(prompt, 0))
        chain.request_finished(prompt, [])
        return total["begin"] + total["poll"]


def p99(seconds: Sequence[float]) -> float:
    """Milliseconds that 99 of 100 took at most."""
    return 1e3 * sorted(seconds)[max(0, -(-len(seconds) * 99 // 100) - 1)]


def cases(scale: Scale, stack: ExitStack) -> Iterator[Case]:
    """Deciding by where the prompt is, the calls that follow, and what a resident block costs."""
    size = SMOKE if scale.smoke else Size()
    world, remote = World(size, scale.folder), Remote(size)
    stack.callback(remote.halves.chain.shutdown)
    stack.callback(world.close)

    def one(case: str, unit: str, ours: Measure, target: float | None = None) -> Case:
        return Case("scheduler", case, unit, ours, target=target, of="ours")

    prompt = f"{size.blocks} blocks"
    resident = f"{size.blocks * size.prompts:,} resident"
    yield one(
        f"decide {prompt}, in cpu, {resident}: p99",
        "ms",
        lambda: p99(world.in_cpu(size.asked)["decide"]),
        5.0,
    )
    yield one(
        f"decide {prompt}, in cpu, {resident}: median",
        "us/block",
        lambda: 1e6 * statistics.median(world.in_cpu(FEW)["decide"]) / size.blocks,
        0.6,
    )
    yield one(
        f"decide {prompt}, on disk, {resident}: longest step, p99",
        "ms",
        lambda: p99(world.on_disk()["decide"]),
        5.0,
    )
    yield one(f"decide {prompt}, nowhere: p99", "ms", lambda: p99(world.nowhere()["decide"]), 5.0)
    yield one(f"look {prompt} up remotely: begin and poll", "us", remote.ask, 200.0)
    for name, call in (("alloc", "update_state_after_alloc"), ("meta", "build_connector_meta")):
        yield one(
            f"{call}, {prompt} in cpu: median",
            "ms",
            lambda name=name: 1e3 * statistics.median(world.in_cpu(FEW)[name]),  # type: ignore[misc]
        )
    grown = world.bytes_per_block
    yield Case(
        "scheduler",
        "memory of a resident block of cpu",
        "bytes/block",
        (lambda: grown) if grown > 0 else None,
        why="" if grown > 0 else "so few blocks found room in memory that the process had already",
    )
