"""The order of copies and compute on CUDA's streams, against a model of them.

The real connectors, the replay engine's scheduler and the real CUDA copier run on streams whose
work comes as late, or as early, as events allow. What the device computes must be what it computes
without tiers. Then each wait of the product is taken away in turn, and something must go wrong.
"""

from __future__ import annotations

import ast
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from spec.chain import ChainSpec
from tests.gpu.copies import BLOCKS, Copies, Loads
from tests.gpu.cuda_model import READING, Event, Mark, Model, Site, Stream
from tests.gpu.streamed_engine import RUNNERS, STREAMS, Runner, StreamedEngine
from tests.support.replay_chains import MODEL, SLOT, measured
from tiers.connector.worker.loading import Piece
from tiers.cpu.spec import CpuSpec
from tiers.gpu import cuda
from tiers.testing import GivenSpec, MemoryStore

ROOT = Path(__file__).parents[2]
PATIENCE: Any = "9s"
REQUESTS = 40
SEEDS = (9, 6)
"""With requests that are preempted, aborted and loaded late; see `serve` of odd and even ones."""
EAGER = [(), STREAMS, ("compute", *STREAMS), *((name,) for name in ("compute", *STREAMS, READING))]
"""Which streams run as early as events allow, while the others are as late; and whether stores are
read as soon as they may be."""


class PromptSpec(GivenSpec):
    """A tier whose lookups the engine's thread makes, so that no other thread's pace matters."""

    is_prompt: ClassVar[bool] = True


def prompts(rng: random.Random, count: int) -> Iterator[tuple[list[int], int]]:
    """Prompts on shared prefixes, of 2 to 12 blocks, and how many tokens to answer."""
    roots = [[rng.randrange(1000) for _ in range(rng.randrange(8, 40))] for _ in range(4)]
    for _ in range(count):
        tail = [rng.randrange(1000) for _ in range(rng.randrange(1, 10))]
        yield rng.choice(roots) + tail, rng.randrange(1, 8)


def serve(model: Model, runner: Runner, patch: pytest.MonkeyPatch, seed: int) -> StreamedEngine:
    """Requests that share prefixes, more than the engine has room for; some are aborted, and the
    connectors' threads get on now and then. Half-way the engine sleeps."""
    store = PromptSpec(type="given", name="store").over(MemoryStore())
    plain = runner.model is MODEL
    slots = 12 if plain else 48
    verify: Any = "always" if seed % 2 else "never"
    memory = CpuSpec(type="cpu", capacity=slots * SLOT, verify=verify)
    tiers = memory, store
    chain = ChainSpec(
        version=1, load_when="always", staging=2 * slots * SLOT, tiers=tiers, max_wait=PATIENCE
    )
    # With a cache of its own an engine keeps the states of prefixes where they are.
    options: Any = {"num_blocks": 20 if plain else 44, "prefix_caching": plain, "batch_tokens": 64}
    engine = StreamedEngine(chain, model, runner, patch, **options)
    rng = random.Random(seed)
    requests = []
    for i, (prompt, max_tokens) in enumerate(prompts(rng, REQUESTS)):
        requests.append(engine.add(prompt, max_tokens))
        for _ in range(rng.randrange(6)):
            engine.step()
            if rng.random() < 0.3:
                engine.threads.run()
        if rng.random() < 0.2:
            engine.scheduler.abort(rng.choice(requests).request_id)
        if rng.random() < 0.2:
            engine.clock.now += 10  # more than loads have
        if i == REQUESTS // 2:
            engine.sleep()
    engine.run()
    engine.check()
    engine.close()
    return engine


SERVED = [
    pytest.param(name, eager, id=f"{name}, {'+'.join(eager) or 'none'}")
    for name in RUNNERS
    for eager in (EAGER if name == "V1 and V2" else EAGER[:2])
]
"""Without a wait that no end below shows each of these goes wrong, but where compute is early."""


@pytest.mark.parametrize(("runner", "eager"), SERVED)
def test_streams_may_be_late_or_early(
    runner: str, eager: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = serve(Model(STREAMS, eager), RUNNERS[runner], monkeypatch, seed=SEEDS[0])
    assert engine.scheduler.preemptions > 0
    loaded = [measured(engine, "loaded_tokens", tier) for tier in ("cpu", "store")]
    assert any(loaded) if RUNNERS[runner].ahead else all(loaded)
    driver = engine.device.driver
    assert driver.batches > 0 == driver.refused
    assert measured(engine, "load_timeouts", "cpu") + measured(engine, "load_timeouts", "store") > 0


def test_pages_that_are_zeroed_early_are_gathered_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this order of requests blocks change hands while a gather still reads them."""
    serve(Model(STREAMS, ("compute",)), RUNNERS["several precisions on V2"], monkeypatch, SEEDS[1])


# -- beginnings, ends and failures -----------------------------------------------------------


def load_at_once(model: Model, patch: pytest.MonkeyPatch) -> None:
    """A load may be the first of all, and what the engine had queued before may come as late."""
    ours = Copies(model, patch)
    ours.rows.fill_(3)

    def when_it_arrives(mark: Mark) -> None:
        for stream in model.streams:
            while mark.stream.name == "unpacking" and stream.name in ("arriving", "opening"):
                if not stream.step(forced=True):
                    break

    model.before_wait = when_it_arrives
    ours.load(range(BLOCKS), range(BLOCKS))
    assert (ours.kv == 3).all()


def overwrite_behind_a_gather(model: Model, patch: pytest.MonkeyPatch) -> None:
    """What the engine does to blocks comes after a gather that has held it has read them."""
    ours = Copies(model, patch)
    model.compute.put(lambda: ours.kv.fill_(5))
    gather = ours.copier.gather(range(BLOCKS), ours.rows, range(BLOCKS))
    gather.hold_engine()
    model.compute.put(lambda: ours.kv.fill_(9))
    gather.wait()
    assert (ours.rows[:, : ours.copier.payload_bytes] == 5).all()


def close_behind_a_gather(model: Model, patch: pytest.MonkeyPatch) -> None:
    """The rows' memory may go away when the copier is closed."""
    ours = Copies(model, patch)
    model.compute.put(lambda: ours.kv.fill_(5))
    ours.copier.gather(range(BLOCKS), ours.rows, range(BLOCKS))
    ours.copier.close()
    assert (ours.rows[:, : ours.copier.payload_bytes] == 5).all()


def fail_in_a_gather(model: Model, patch: pytest.MonkeyPatch) -> None:
    """The slots of a gather that failed are another's, as soon as that is known."""
    ours = Copies(model, patch)
    for operations in range(9):
        ours.fail_after(operations)
        copy = ours.copier.gather(range(BLOCKS), ours.rows, range(BLOCKS))
        with pytest.raises(RuntimeError, match="device"):
            copy.wait()
        ours.rows.fill_(9)
        model.drain()
        assert (ours.rows == 9).all()


def fail_in_a_scatter(model: Model, patch: pytest.MonkeyPatch) -> None:
    """So are the blocks of a load that failed, and the rows that it read."""
    ours = Copies(model, patch)
    for operations in range(9):
        ours.rows.fill_(1)
        ours.fail_after(operations)
        with pytest.raises(RuntimeError, match="device"):
            ours.load(range(BLOCKS), range(BLOCKS))
        ours.kv.fill_(9)
        ours.rows.fill_(2)
        model.drain()
        assert (ours.kv == 9).all()
        assert not any((wave.rows == 2).any() for wave in ours.copier._in._waves)


def end_in_the_middle(model: Model, patch: pytest.MonkeyPatch) -> None:
    """The blocks of a load that ends early, after two of its waves are queued, are the engine's."""
    copies = Copies(model, patch)
    load = Loads(copies, patch).begin()

    def copy_in(wave: Sequence[int]) -> None:
        load.copy_in([Piece(load, i, i, i) for i in wave], lambda _: copies.begin_load(wave, wave))

    for wave in ([0, 1], [2, 3]):
        copy_in(wave)
    assert load.end() == ({4, 5, 6}, set())
    copies.kv.fill_(9)
    copy_in([4])
    model.drain()
    assert (copies.kv == 9).all()


def load_from_host_memory(model: Model, patch: pytest.MonkeyPatch) -> None:
    """A load of several waves has arrived when it has ended."""
    loads = Loads(Copies(model, patch), patch)
    loads.begin()
    loads.end()


def load_from_a_store(model: Model, patch: pytest.MonkeyPatch) -> None:
    """So has one whose waves pass through memory that others are read into."""
    loads = Loads(Copies(model, patch), patch, rows=1)
    loads.begin(from_store=True)
    loads.end()
    loads.close()


def verified(model: Model, patch: pytest.MonkeyPatch, **options: Any) -> StreamedEngine:
    """An engine that has computed a prompt, and whose threads have not begun."""
    memory = CpuSpec(type="cpu", capacity=64 * SLOT, verify="always")
    chain = ChainSpec(version=1, load_when="always", staging=24 * SLOT, tiers=(memory,))
    runner = RUNNERS["V1 and V2"]
    engine = StreamedEngine(chain, model, runner, patch, num_blocks=20, **options)
    engine.add(range(40), 1)
    while engine.scheduler.requests:
        engine.step()
    return engine


def load_again(engine: StreamedEngine, but: str = "") -> None:
    """Load the prompt, whose blocks must be whole."""
    engine.settle(but)
    engine.scheduler.pool.forget_all()
    engine.add(range(40), 2)
    engine.run(but)
    engine.check()
    assert measured(engine, "loaded_tokens", "cpu") > 0


def sleep_behind_a_gather(model: Model, patch: pytest.MonkeyPatch) -> None:
    """What an engine has computed before it sleeps is stored as it was."""
    engine = verified(model, patch)
    engine.sleep()
    load_again(engine)


def load_before_the_checksum(model: Model, patch: pytest.MonkeyPatch) -> None:
    """A block that is asked for before its checksum is known is not taken for damaged."""
    load_again(verified(model, patch), but="checksum")


def begin_with_the_checksum(model: Model, patch: pytest.MonkeyPatch) -> None:
    """Nor is one whose checksum is asked for before it is gathered."""
    engine = verified(model, patch)
    engine.threads.named("checksum").run_next()
    load_again(engine)


ENDS = [
    begin_with_the_checksum,
    load_before_the_checksum,
    load_at_once,
    load_from_host_memory,
    load_from_a_store,
    end_in_the_middle,
    sleep_behind_a_gather,
    close_behind_a_gather,
    overwrite_behind_a_gather,
    fail_in_a_gather,
    fail_in_a_scatter,
]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: str(end.__name__))
@pytest.mark.parametrize("eager", EAGER, ids=lambda names: "+".join(names) or "none")
def test_beginnings_ends_and_failures(
    end: Callable[[Model, pytest.MonkeyPatch], None],
    eager: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end(Model(STREAMS, eager), monkeypatch)


@pytest.mark.parametrize("end", ENDS, ids=lambda end: str(end.__name__))
@pytest.mark.parametrize("eager", EAGER[:3], ids=lambda names: "+".join(names) or "none")
def test_they_are_the_same_where_the_driver_has_no_batches(
    end: Callable[[Model, pytest.MonkeyPatch], None],
    eager: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model(STREAMS, eager)
    model.has_batches = False
    end(model, monkeypatch)


@pytest.mark.parametrize(("block", "slot"), [(BLOCKS, 0), (-1, 0), (0, BLOCKS), (0, -1)])
def test_a_number_out_of_range_reaches_no_device(
    block: int, slot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Copies(Model(STREAMS), monkeypatch)
    ours.fail_after(0)
    with pytest.raises(IndexError, match="out of range"):
        ours.copier.gather([1, block], ours.rows, [1, slot]).wait()
    with pytest.raises(IndexError, match="out of range"):
        ours.load([1, slot], [1, block])
    with pytest.raises(IndexError, match="out of range"):
        ours.copier.gather([1, 2], ours.rows, [1]).wait()


def test_a_copy_that_has_ended_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that lags has thousands of jobs, and the engine's thread waits for the copies of those
    whose blocks it overwrites: in every step."""
    ours = Copies(Model(STREAMS), monkeypatch)
    copy = ours.copier.gather(range(BLOCKS), ours.rows, range(BLOCKS))
    copy.wait()
    monkeypatch.setattr(torch.cuda, "device", None)
    copy.wait()


def test_launches_do_not_depend_on_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = set()
    for slots in ([0, 1, 2, 3, 4], [6, 0, 4, 2, 5]):
        model = Model(STREAMS)
        ours = Copies(model, monkeypatch)
        ours.copier.gather(range(5), ours.rows, slots).wait()
        launches.add(next(one for one in model.streams if one.name == "packing").queued)
    assert len(launches) == 1


@pytest.mark.parametrize("pages", [1, 48])
def test_a_stream_is_never_full(pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that queues on a full stream, of a thousand operations, holds up every other that
    launches anything: the engine's, until its own step is computed."""
    model, count = Model(STREAMS), 1200
    ours = Copies(model, monkeypatch, count, pages)
    ours.kv.copy_(torch.randint(0, 256, ours.kv.shape))
    before, size = ours.kv.clone(), ours.copier.payload_bytes
    slots = random.Random(0).sample(range(count), count)
    ours.copier.gather(range(count), ours.rows, slots).wait()
    assert torch.equal(ours.rows[slots, :size], before.reshape(count, size))
    ours.kv.zero_()
    ours.load(slots, range(count))
    assert torch.equal(ours.kv, before)
    assert model.deepest < 600


@pytest.mark.parametrize("is_held", [False, True])
def test_what_else_crosses_the_bus_comes_behind_little(
    is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's result, say. Of a gather that holds the engine its thread waits until all is queued,
    so that it goes on sooner with more of it queued."""
    model, count = Model(STREAMS), 400
    ours = Copies(model, monkeypatch, count)
    monkeypatch.setattr(cuda, "MOST_BYTES", 8 * SLOT)
    for _ in range(2):
        gather = ours.copier.gather(range(count), ours.rows, range(count))
        if is_held:
            gather.hold_engine()
        gather.wait()
    model.deepest = 0
    ours.copier.gather(range(count), ours.rows, range(count)).wait()
    assert (model.deepest > 100) == is_held


def test_rows_may_be_longer_than_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Copies(Model(STREAMS), monkeypatch)
    ours.kv.copy_(torch.arange(ours.kv.numel()).view_as(ours.kv))
    before, size = ours.kv.clone(), ours.copier.payload_bytes
    rows = torch.full((BLOCKS, 2 * SLOT), 7, dtype=torch.uint8)
    slots = [3, 4, 1, 0, 6]
    ours.copier.gather(range(5), rows, slots).wait()
    assert torch.equal(rows[slots, :size], before[:5].view(5, size))
    assert (rows[2] == 7).all()
    assert (rows[:, SLOT:] == 7).all()
    ours.kv.zero_()
    ours.rows = rows
    ours.load(slots, range(5))
    assert torch.equal(ours.kv[:5], before[:5])


# -- each wait is needed ---------------------------------------------------------------------

WAITS = {"hold_engine", "wait_event", "synchronize", "wait", "_fence", "wait_for"}
FILES = [
    "tiers/gpu/cuda.py",
    "tiers/connector/worker/loading.py",
    "tiers/connector/worker/offloading_worker.py",
    "tiers/connector/worker/storing.py",
    "tiers/connector/worker/checksums.py",
    "tiers/connector/worker/host_slots.py",
]
NO_COPIES = {
    "wait([*in_flight, self._joining] if self._joining else in_flight, self._drain)",
    "wait_for([before], self._device)",
    "wait([ahead])",
    "wait([*in_flight, *(future for _, future in self._fills)], drain)",
}
"""Waits for other things: a tier that closes gives its stores and loads some time, streams are not
filled, and a load that ends early waits for its store (see `test_loading.py`)."""


def waits() -> Iterator[Any]:
    """Every line of the product that makes a stream or a thread wait for a copy."""
    for path in FILES:
        source = (ROOT / path).read_text()
        for call in ast.walk(ast.parse(source)):
            if not isinstance(call, ast.Call):
                continue
            if getattr(call.func, "attr", getattr(call.func, "id", "")) not in WAITS:
                continue
            what = ast.get_source_segment(source, call)  # which reads the whole file each time
            if what not in NO_COPIES:
                yield pytest.param((path, call.lineno), id=f"{path}:{what}")


@pytest.mark.parametrize("site", list(waits()))
def test_each_wait_is_needed(site: Site) -> None:
    """Some order of the streams shows that the wait is missing."""
    served: list[Callable[..., object]] = [
        partial(serve, runner=runner, seed=seed)
        for runner in reversed(RUNNERS.values())
        for seed in SEEDS
    ]
    ends = ((end, eager) for eager in EAGER for end in ENDS)
    for run, eager in itertools.chain(ends, itertools.product(served, EAGER)):
        model = Model(STREAMS, eager)
        model.taken_away = site
        with pytest.MonkeyPatch.context() as patch:
            try:
                run(model, patch=patch)
            except AssertionError:
                assert model.times_taken_away
                return
    pytest.fail("nothing went wrong without it")


# -- the model itself ------------------------------------------------------------------------


def test_streams_run_when_they_are_waited_for_or_when_they_may() -> None:
    model = Model(("late", "eager"), eager=("eager",))
    late, eager = Stream(model, "late"), Stream(model, "eager")
    ran: list[str] = []
    late.put(lambda: ran.append("late"))
    behind = Event(model, sleeps=True)
    behind.record(late)
    late.put(lambda: ran.append("later"))
    eager.put(lambda: ran.append("eager"))
    eager.wait_event(behind)
    eager.put(lambda: ran.append("behind"))
    assert ran == ["eager"]
    behind.record(eager)  # what waits already waits for what was recorded then
    with pytest.raises(AssertionError, match="first device"):
        behind.synchronize()
    with model.device(None):
        behind.synchronize()
    assert ran == ["eager", "late", "behind"]
    model.drain()
    assert ran == ["eager", "late", "behind", "later"]
