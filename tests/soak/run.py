"""The soak: the replay engine for minutes or days, while everything below it breaks.

    python -m tests.soak.run --minutes 60 --seed 7

Breaks disk, Redis and its own process again and again under engines whose answers show a wrong
byte. Each has another chain of the same stores, which changes while it runs. Ends with status 1 if
an answer was wrong, a request stuck, or a slot or descriptor leaked.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tests.soak.chains import ENGINE, MODELS, TIERS, Chains
from tests.soak.faults import Mood, SoakFault, all_faults
from tests.soak.prompts import conversations, from_trace
from tests.support.changing import changes_of, tiers_of
from tests.support.replay import ReplayEngine, ReplayRequest, answer
from tests.support.replay_chains import MODEL
from tests.support.servers import RedisServer, binaries

AT_ONCE = 12
"""Requests in flight."""
STUCK_SECONDS = 30.0
"""A request that takes longer is stuck: for tiers it waits `MAX_WAIT`, and it computes in one."""
ENGINE_SECONDS = 5.0
"""An engine runs for this time; the next one has the same stores, and another chain of them."""
CHANGED, RESET = 0.02, 0.0005
"""Part of the steps before which its chain changes, and before which its caches are reset."""
ABORTED = 0.03
"""Part of the requests that are given up in the middle."""


@dataclass
class SoakReport:
    """The results. All but the first three should be zero; memory should stay about the same.

    `wrong_blocks`: answers that show a wrong block. `leaked_slots`: slots and paged blocks in use
    when nothing is in flight. The last two are measured between the end of the first engine and
    that of the last, in descriptors and bytes.
    """

    requests: int = 0
    faults: int = 0
    changes: int = 0
    wrong_blocks: int = 0
    stuck_requests: int = 0
    leaked_slots: int = 0
    leaked_fds: int = 0
    rss_growth_bytes: int = 0

    def is_clean(self) -> bool:
        """Whether nothing is wrong, stuck or leaked."""
        return not (
            self.wrong_blocks or self.stuck_requests or self.leaked_slots or self.leaked_fds
        )


class _Chance:
    """Injects a fault every `every` seconds or so, and heals it some time later."""

    def __init__(self, faults: list[SoakFault], every: float, rng: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self._faults = faults
        self._every = every
        self._random = rng
        self._next = time.monotonic() + every
        self._open: dict[str, tuple[float, Callable[[], object]]] = {}

    @property
    def is_lacking(self) -> bool:
        """Whether the process lacks what others' cures need, and who reads a chain."""
        return "process" in self._open

    def act(self) -> None:
        now = time.monotonic()
        due = {"process": self._open["process"]} if self.is_lacking else dict(self._open)
        for name, (until, heal) in due.items():
            if now >= until:
                heal()
                del self._open[name]
        if now < self._next or self.is_lacking:
            return
        self._next = now + self._random.expovariate(1 / self._every)
        fault = self._random.choice(self._faults)
        # One at a time of each place, so that mending one does not mend another.
        place = fault.name.split()[0]
        if place in self._open:
            return
        fault.inject()
        self.counts[fault.name] += 1
        if fault.heal is not None:
            self._open[place] = (now + self._random.uniform(0.2, 2 * self._every), fault.heal)

    def heal_all(self) -> None:
        for _, heal in reversed(self._open.values()):  # what the process lacks is the last
            heal()
        self._open.clear()


class _InFlight(NamedTuple):
    request: ReplayRequest
    prompt: list[int]
    since: float


class Soak:
    """Runs for some time, and prints its counts now and then."""

    def __init__(
        self,
        prompts: Iterator[list[int]],
        server: RedisServer,
        folder: Path,
        every: float,
        seed: int,
    ) -> None:
        self.report = SoakReport()
        self._prompts = prompts
        self._random = random.Random(seed)
        mood = Mood(self._random)
        self._chains = Chains(folder, server.url, mood, self._random)
        faults = all_faults(server, folder / "disk", mood, self._random)
        self.chance = _Chance(faults, every, self._random)

    def run(self, seconds: float) -> SoakReport:
        """Soak for this time."""
        end = time.monotonic() + seconds
        baseline: tuple[int, int] | None = None
        while baseline is None or time.monotonic() < end:
            self._one_engine(min(ENGINE_SECONDS, max(1.0, (end - time.monotonic()) / 2)))
            gc.collect()
            now = _open_files(), _resident_bytes()
            baseline = baseline or now
            self.report.leaked_fds = max(0, now[0] - baseline[0])
            self.report.rss_growth_bytes = now[1] - baseline[1]
            print(f"{self.report.requests} requests, {self.report.faults} faults")
        return self.report

    def _one_engine(self, seconds: float) -> None:
        model = self._model = self._random.choice(MODELS)
        drawn = {"prefix_caching": False, "batch_tokens": 1024, **self._chains.some(ENGINE)}
        # The first has all kinds of tiers, so that what a process keeps for them is no leak.
        chain = self._chains.draw(None if self.report.requests else TIERS)
        facts = {"model": repr(model)}
        size = 400 * len(model.windows)
        engine = ReplayEngine(chain, model, num_blocks=size, facts=facts, **drawn)
        changes = changes_of(engine)
        end = time.monotonic() + seconds
        in_flight: list[_InFlight] = []
        while in_flight or changes.waits or time.monotonic() < end:
            while len(in_flight) < AT_ONCE and time.monotonic() < end:
                prompt = next(self._prompts)
                request = engine.add(prompt, self._random.randrange(1, 6))
                in_flight.append(_InFlight(request, prompt, time.monotonic()))
            self.chance.act()
            is_changed = self._random.random() < CHANGED and time.monotonic() < end
            if is_changed and not self.chance.is_lacking:
                changes.request(self._chains.change(changes.chain))
            if self._random.random() < RESET:
                engine.reset_cache()
            if not engine.step():
                time.sleep(0.0005)
            in_flight = [a for a in in_flight if not self._is_over(engine, a)]
            engine.stats.reset()
        self.report.faults = self.chance.counts.total()
        self.report.changes += changes.version - 1
        self.chance.heal_all()
        self._close(engine)

    def _is_over(self, engine: ReplayEngine, asked: _InFlight) -> bool:
        """Whether the request has ended, or is ended: given up, or stuck."""
        if asked.request.request_id not in engine.scheduler.requests:
            self.report.requests += 1
            ranks = len(engine.workers)
            right = answer(self._model, asked.prompt, asked.request.max_tokens, ranks)
            self.report.wrong_blocks += asked.request.output != right
            return True
        waited = time.monotonic() - asked.since
        if waited > STUCK_SECONDS:
            self.report.stuck_requests += 1
        elif self._random.random() > ABORTED / 50:
            return False
        engine.scheduler.abort(asked.request.request_id)
        self.report.requests += 1
        return True

    def _close(self, engine: ReplayEngine) -> None:
        """Let transfers end and count leaks."""
        try:
            engine.settle()
        except RuntimeError:
            self.report.stuck_requests += 1
        tiers = tiers_of(engine)
        leaked = engine.num_blocks - engine.scheduler.pool.num_free
        leaked += sum(tier._stores.slots_pinned for tier in tiers)
        if tiers:  # a change that failed may have left none
            leaked += tiers[0].pool.in_use - sum(tier.manager.slots_kept() for tier in tiers)
        self.report.leaked_slots += leaked
        engine.close()


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=3.0, help="mean seconds between two faults")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and faults")
    parser.add_argument("--trace", type=Path, help="take the prompts from this trace")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    args = parser.parse_args()
    # The soak prints the faults that it injects; of the tiers' log only errors are news.
    logging.getLogger("tiers").setLevel(logging.ERROR)
    tokens = MODEL.block_tokens
    made_up = conversations(random.Random(args.seed), tokens)
    prompts = made_up if args.trace is None else from_trace(args.trace, tokens)
    memory = {"maxmemory": "16mb", "maxmemory_policy": "allkeys-lru"}
    with (
        TemporaryDirectory(prefix="kvtiers-soak-") as folder,
        RedisServer(binaries()["valkey"], **memory) as server,
    ):
        soak = Soak(prompts, server, Path(folder), args.every, args.seed)
        report = soak.run(args.minutes * 60)
    print(", ".join(f"{name}: {count}" for name, count in soak.chance.counts.most_common()))
    text = json.dumps(asdict(report))
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")
    return 0 if report.is_clean() else 1


if __name__ == "__main__":
    sys.exit(main())
