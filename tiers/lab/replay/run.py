"""`replay`: serves a trace with a real chain, and reports as `simulate` does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

from spec.chain import ChainSpec
from spec.offloading import HostSpec
from tiers.connector.assembly import open_worker, scheduler_parts
from tiers.connector.multi.multi_scheduler import MultiScheduler
from tiers.connector.observers import GhostWatcher, open_ghosts
from tiers.contract.engine_info import EngineInfo
from tiers.lab.replay.clock import Clock, CountedClock, PacedClock
from tiers.lab.replay.kv import PagedKV
from tiers.lab.replay.links import Link, copier_over
from tiers.lab.replay.measures import Mark, report_of
from tiers.lab.replay.scaling import CannotReplay, Places, Scale, linked, scaled
from tiers.lab.replay.trace_engine import TraceEngine
from tiers.lab.replay.trace_requests import TracedRequest
from tiers.lab.replay.trace_worker import TraceWorker
from tiers.lab.server import Server
from tiers.traces.trace import TraceRequest
from tiers.tuning.machine import Machine
from tiers.tuning.report import Report

WORD = 8


@dataclass(frozen=True)
class ReplayOptions:
    """How a replay runs.

    `speed`: seconds of the trace in one of the machine's; None: time is counted, not waited for, so
    that only the profiles' times count. `bytes_per_token`: the scale. `folder`: where disk tiers
    keep their blocks meanwhile; None: a temporary folder. `progress` is told of each request.
    """

    speed: float | None = None
    bytes_per_token: int = 8
    folder: Path | None = None
    progress: Callable[[int], None] = lambda count: None


def replay(
    requests: Iterable[TraceRequest],
    block_tokens: int,
    chain: ChainSpec,
    machine: Machine,
    *,
    warm: float = 0.0,
    options: ReplayOptions = ReplayOptions(),
) -> Report:
    """Serve the requests with the chain's real connectors and stores; `warm`: as `simulate`.

    Tiers have as many blocks as the chain says, of `bytes_per_token` a token, in folders and
    servers of the replay's own, behind links as fast as `machine` says. Every loaded block is
    compared with what was stored. Raises WrongBytes, SpecError for a tier without a profile,
    CannotReplay, NoServer.
    """
    trace = list(requests)
    with _opened(trace, block_tokens, chain, machine, options) as (driver, ghosts):
        mark = driver.run(trace, int(len(trace) * warm), options.progress)
        return report_of(driver.engine, chain, machine, (mark, driver.mark()), ghosts)


@contextmanager
def _opened(
    trace: list[TraceRequest],
    block_tokens: int,
    chain: ChainSpec,
    machine: Machine,
    options: ReplayOptions,
) -> Iterator[tuple[Driver, tuple[GhostWatcher, ...]]]:
    """Make all that a replay runs on, and end it in any case."""
    words = max(1, options.bytes_per_token * block_tokens // WORD)
    scale = Scale(machine.kv_bytes_per_token * block_tokens, words * WORD)
    num_blocks = _paged_blocks(trace, block_tokens, machine, scale)
    info = EngineInfo(
        {"model": "replay"}, block_tokens, block_tokens, num_blocks, step_tokens=machine.step_tokens
    )
    with ExitStack() as stack:
        places = _places(stack, options)
        small = scaled(chain, machine, info, scale, places)
        clock: Clock = CountedClock() if options.speed is None else PacedClock(options.speed)
        behind, links = linked(small, machine, scale, clock)
        kv = _paged_kv(num_blocks, words)
        parts = scheduler_parts(behind, info, clock.now)
        states = parts.settings.requests
        assert states is not None, "tiers share them"
        # Their time stands still: all requests of a replay weigh the same.
        ghosts = open_ghosts(chain, states, lambda: scale.real_bytes, lambda: 0.0)
        observers = (*parts.settings.observers, *ghosts)
        settings = replace(parts.settings, observers=observers)
        scheduler = MultiScheduler(*parts._replace(settings=settings))
        stack.callback(scheduler.shutdown)
        hosts = _host_links(chain, links)
        copier = copier_over(next(iter(hosts.values()), None))
        half = open_worker(behind, info, copier, now=clock.now)
        stack.callback(half.shutdown)
        stack.callback(clock.stop)
        half.register_kv_caches(kv.tensors)
        scheduler.set_xfer_handshake_metadata({0: half.get_handshake_metadata()})
        worker = TraceWorker(half, clock, hosts)
        engine = TraceEngine(
            scheduler, states, worker, kv, num_blocks, block_tokens, machine, clock
        )
        yield Driver(engine, worker, clock, links), ghosts


def _paged_kv(num_blocks: int, words: int) -> PagedKV:
    try:
        return PagedKV(num_blocks, words)
    except RuntimeError as error:  # torch has no other class for this
        raise CannotReplay(
            f"there is no memory for the engine's cache of {num_blocks} blocks of {words * WORD} "
            "bytes: take fewer bytes of KV a token, with --scale"
        ) from error


def _places(stack: ExitStack, options: ReplayOptions) -> Places:
    """Folders that go with the stack, as do the servers that are started."""
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvtiers-")))
    disks = folder
    if options.folder is not None:
        kept = TemporaryDirectory(prefix="kvtiers-replay-", dir=options.folder)
        disks = Path(stack.enter_context(kept))

    def start_server(blocks: int | None, payload_bytes: int) -> Path:
        place = Path(mkdtemp(dir=folder))
        server = Server(place, {"maxmemory-samples": "10"})
        stack.callback(server.kill)
        if blocks is not None:
            server.limit(blocks, payload_bytes)
        return place

    return Places(disks, start_server)


def _paged_blocks(
    trace: list[TraceRequest], block_tokens: int, machine: Machine, scale: Scale
) -> int:
    """Blocks of the engine's paged KV. Raises CannotReplay for a prompt that never fits."""
    blocks = scale.blocks(machine.engine_cache)
    longest = max((request.input_length for request in trace), default=1)
    if -(-longest // block_tokens) > blocks:
        raise CannotReplay(
            f"the engine's cache holds {blocks * block_tokens} tokens, and the longest prompt has "
            f"{longest}: give the machine more engine_cache"
        )
    return blocks


def _host_links(chain: ChainSpec, links: dict[str, Link]) -> dict[int, Link]:
    """The links of tiers in host memory, by the tiers' places."""
    places = enumerate(chain.tiers)
    return {place: links[tier.tier_name] for place, tier in places if isinstance(tier, HostSpec)}


class Driver:
    """Lets the trace's requests arrive and its time pass."""

    def __init__(
        self, engine: TraceEngine, worker: TraceWorker, clock: Clock, links: dict[str, Link]
    ) -> None:
        self.engine = engine
        self._worker = worker
        self._clock = clock
        self._links = links

    def run(self, trace: list[TraceRequest], warm: int, progress: Callable[[int], None]) -> Mark:
        """Serve them all; what had been done when the first came that counts."""
        engine, clock = self.engine, self._clock
        clock.begin()
        mark = self.mark()
        for number, one in enumerate(trace):
            request = TracedRequest.of(number, one, counts=number >= warm)
            self._pass_until(request.arrival)
            if number == warm:
                mark = self.mark()
            engine.add(request)
            progress(number)
        self._pass_until(None)
        return replace(mark, ended=clock.now())

    def mark(self) -> Mark:
        """What has been done by now."""
        self.engine.take_stats()
        ways = {name: (link.loads.busy, link.stores.busy) for name, link in self._links.items()}
        stats = {tier: dict(measures) for tier, measures in self.engine.stats.data.items()}
        return Mark(self._clock.now(), 0.0, ways, stats)

    def _pass_until(self, arrival: float | None) -> None:
        """Do all that is to be done until then; None: until no request is left."""
        engine, worker, clock = self.engine, self._worker, self._clock
        while True:
            worker.settle(engine.take)
            while engine.turn():
                worker.settle(engine.take)
            if clock.now() >= arrival if arrival is not None else not engine.busy:
                return
            events = [engine.next_event(), clock.next_wake(), worker.next_end(), arrival]
            moments = [moment for moment in events if moment is not None]
            if not moments and not worker.busy:
                raise CannotReplay("the engine is stuck: nothing is in flight")
            clock.advance(min(moments, default=clock.now()), poll=worker.busy)
