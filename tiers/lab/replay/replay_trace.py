"""`replay`: serves a trace with a real chain, and reports as `simulate` does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from spec.chain import ChainSpec
from spec.offloading import HostSpec, OffloadingSpec
from tiers.connector.assembly import scheduler_parts, worker_parts
from tiers.connector.multi.multi_scheduler import MultiScheduler
from tiers.connector.multi.multi_worker import MultiWorker
from tiers.contract.engine_info import EngineInfo
from tiers.lab.replay.clock import Clock
from tiers.lab.replay.links import copier_over
from tiers.lab.replay.requests import TracedRequest
from tiers.lab.replay.scaling import CannotReplay, Scale, linked, scaled
from tiers.lab.replay.timed_engine import Mark, TimedEngine
from tiers.lab.replay.timed_worker import TimedWorker, TraceModel
from tiers.traces.trace import TraceRequest
from tiers.tuning.machine import Machine, size_of
from tiers.tuning.report import DAY, Report, TierUse, quantile, stretches

DROPPED = ("store_dropped_no_slot", "store_dropped_inflight", "store_dropped_budget")
"""Counters of blocks that a tier missed and its rules admitted."""
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
    profile, CannotReplay, NoServer.
    """
    trace = list(requests)
    warmed = int(len(trace) * warm)
    words = max(1, bytes_per_token * block_tokens // WORD)
    with _opened(trace, block_tokens, chain, machine, words, folder) as engine:
        traced = (
            TracedRequest(number, request, block_tokens, counts=number >= warmed)
            for number, request in enumerate(trace)
        )
        start = engine.serve(traced, warmed, progress)
        return _report(engine, chain, (start, engine.mark()))


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
        small = scaled(chain, machine, info, scale, Path(stack.enter_context(kept)), stack)
        clock = Clock()
        behind, links = linked(small, machine, scale, clock)
        parts = scheduler_parts(behind, info, clock.now)
        states = parts.settings.requests
        assert states is not None, "tiers share them"
        connector = MultiScheduler(*parts)
        stack.callback(connector.shutdown)
        tiers = enumerate(chain.tiers)
        hosts = {place: links[t.tier_name] for place, t in tiers if isinstance(t, HostSpec)}
        copier = copier_over(next(iter(hosts.values()), None))
        half = MultiWorker(*worker_parts(behind, info, copier, now=clock.now))
        stack.callback(half.shutdown)
        stack.callback(clock.stop)
        model = TraceModel(1, words, block_tokens)
        worker = TimedWorker(model, num_blocks, half, clock, hosts)
        yield TimedEngine(model, info, connector, states, worker, machine, clock, links)


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


def _report(engine: TimedEngine, chain: ChainSpec, marks: tuple[Mark, Mark]) -> Report:
    """The engine's outcome, and the use of its tiers between two marks."""
    machine, outcome = engine.machine, engine.outcome
    seconds = max(marks[1].now - marks[0].now, 1e-9)
    waits = sorted(served.wait for served in outcome.served)
    return Report(
        requests=len(waits),
        seconds=seconds,
        gpu_load=outcome.busy / seconds / machine.gpus,
        tiers=tuple(_use(engine, tier, marks, seconds) for tier in chain.tiers),
        prompt_tokens=outcome.prompt_tokens,
        engine_hit_tokens=outcome.local_tokens,
        computed_tokens=outcome.computed_tokens,
        ttft_mean=sum(waits) / len(waits) if waits else 0.0,
        ttft_p50=quantile(waits, 0.5),
        ttft_p99=quantile(waits, 0.99),
        prefill_seconds_saved=sum(outcome.tier_tokens.values()) / machine.prefill_rate,
        stretches=stretches(outcome.served),
        room_wait=(marks[1].room_wait - marks[0].room_wait) / seconds,
    )


def _use(
    engine: TimedEngine, tier: OffloadingSpec, marks: tuple[Mark, Mark], seconds: float
) -> TierUse:
    name, machine = tier.tier_name, engine.machine
    profile = machine.profile(name, tier.type)
    size = engine.model.block_tokens * machine.kv_bytes_per_token * profile.stored_share

    def grown(counter: str) -> int:
        counts = [mark.stats.get(name, {}).get(counter, 0.0) for mark in marks]
        start, end = (count if isinstance(count, int | float) else 0.0 for count in counts)
        return int(end - start)

    stored, dropped = grown("stored_blocks"), sum(map(grown, DROPPED))
    loads, stores = (marks[1].links[name][i] - marks[0].links[name][i] for i in (0, 1))
    a_day = stored * size / seconds * DAY
    return TierUse(
        name=name,
        hit_tokens=engine.outcome.tier_tokens[name],
        load_busy=loads / seconds,
        store_busy=stores / seconds,
        loaded_bytes=int(grown("loaded_blocks") * size),
        stored_bytes=int(stored * size),
        written_bytes_per_day=a_day,
        offered_blocks=stored + dropped,
        dropped_blocks=dropped,
        life_years=profile.life_years(a_day, getattr(tier, "write_budget", None)),
        price_per_month=profile.price(size_of(tier)),
    )
