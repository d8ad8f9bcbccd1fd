"""`replay`: serves a trace with a real chain, and reports as `simulate` does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from spec.chain import ChainSpec
from spec.offloading import HostSpec
from tiers.connector.assembly import scheduler_parts, worker_parts
from tiers.connector.multi.multi_scheduler import MultiScheduler
from tiers.connector.multi.multi_worker import MultiWorker
from tiers.contract.engine_info import EngineInfo
from tiers.gpu.copier import open_copier
from tiers.lab.replay.clock import Clock
from tiers.lab.replay.links import copier_over
from tiers.lab.replay.requests import TracedRequest
from tiers.lab.replay.scaling import CannotReplay, Scale, linked, scaled
from tiers.lab.replay.timed_engine import TimedEngine
from tiers.lab.replay.timed_worker import TimedWorker, TraceModel
from tiers.traces.trace import TraceRequest
from tiers.tuning.machine import Machine
from tiers.tuning.report import Report
from tiers.tuning.simulation.sim_chain import SimChain
from tiers.tuning.simulation.simulate import report_on

WORD = 8


def replay(
    requests: Iterable[TraceRequest],
    block_tokens: int,
    chain: ChainSpec,
    machine: Machine,
    *,
    warm: float = 0.0,
    bytes_per_token: int = 8,
    folder: Path | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> Report:
    """Serve the requests with the chain's real connectors and stores; `warm`: as `simulate`.

    Tiers have as many blocks as the chain says, of `bytes_per_token` a token, in folders and
    servers of the replay's own, behind links as fast as `machine` says; `folder`: those of disk
    tiers lie in it. Every loaded block is compared with the bytes that were stored. `progress` is
    called with the number of each request. Raises WrongBytes, SpecError for a tier without a
    profile, CannotReplay, NoPlace.
    """
    trace = list(requests)
    warmed = int(len(trace) * warm)
    words = max(1, bytes_per_token * block_tokens // WORD)
    with _opened(trace, block_tokens, chain, machine, words, folder) as engine:
        traced = (
            TracedRequest(number, request, block_tokens, counts=number >= warmed)
            for number, request in enumerate(trace)
        )
        marks = engine.serve(traced, warmed, progress)
        came = [request.timestamp / 1000 for request in trace[warmed:]]
        tiers = SimChain.of(chain).tiers
        return report_on(engine.served, marks, came, tiers, machine, block_tokens)


@contextmanager
def _opened(
    trace: list[TraceRequest],
    block_tokens: int,
    chain: ChainSpec,
    machine: Machine,
    words: int,
    folder: Path | None,
) -> Iterator[TimedEngine]:
    """Open a replay's engine, and close it in any case. `words`: of a block."""
    scale = Scale(machine.kv_bytes_per_token * block_tokens, words * WORD)
    num_blocks = _paged_blocks(trace, block_tokens, machine, scale)
    info = EngineInfo(
        {"model": "replay"}, block_tokens, block_tokens, num_blocks, step_tokens=machine.step_tokens
    )
    with ExitStack() as stack:
        kept = TemporaryDirectory(prefix="kvtiers-replay-", dir=folder)
        small = scaled(chain, info, scale, Path(stack.enter_context(kept)), stack)
        clock = Clock()
        behind, links = linked(small, machine, scale, clock)
        children, settings, names, name = scheduler_parts(behind, info, clock.now)
        connector = MultiScheduler(children, settings, names, name)
        stack.callback(connector.shutdown)
        tiers = enumerate(chain.tiers)
        hosts = {place: links[t.tier_name] for place, t in tiers if isinstance(t, HostSpec)}
        copier = copier_over(next(iter(hosts.values()))) if hosts else open_copier
        half = MultiWorker(*worker_parts(behind, info, copier, now=clock.now))
        stack.callback(half.shutdown)
        stack.callback(clock.stop)
        model = TraceModel(1, words, block_tokens)
        worker = TimedWorker(model, num_blocks, half, clock, hosts)
        yield TimedEngine(model, info, connector, settings.requests, worker, machine, clock, links)


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
