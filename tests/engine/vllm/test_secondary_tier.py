"""KVTiersStore under vLLM's own manager of tiers: what it loads is what was stored, or a miss."""

from __future__ import annotations

import itertools
import os
import pkgutil
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spec.offloading import StoreContext, StoreSpec
from spec.registry import make_tier
from tests.support.clock import wait_for
from tiers.errors import RecordError
from tiers.records import NamespaceNote
from tiers.store import Block, TierStore
from tiers.testing import MemoryStore

pytestmark = pytest.mark.vllm

ROW = 2 * 4096
BLOCKS = [bytes([number]) * 32 for number in range(1, 21)]


class Gate(MemoryStore):
    """A store in memory that answers no `get` and no `put` while `is_open` is not set, and fails
    while `fails` is."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped: list[bytes] = []
        self.is_open = threading.Event()
        self.is_open.set()
        self.fails = False
        self.sizes: list[int] = []

    def _pass(self, blocks: Sequence[Block]) -> None:
        self.sizes.append(len(blocks))
        assert self.is_open.wait(60) and not self.fails

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        self._pass(blocks)
        return super().get(blocks)

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        self._pass(blocks)
        return super().put(blocks)

    def drop(self, keys: Sequence[bytes]) -> None:
        super().drop(keys)
        self.dropped += keys


class GateSpec(StoreSpec):
    def open(self, site: StoreContext) -> TierStore:
        return GATES[-1]


GATES: list[Gate] = []


class Hosting:
    """What a HostingEngine shows of an engine; `unchanged`: what looks at the weights find."""

    ranks = 1

    def __init__(self, is_known: bool) -> None:
        self.is_known, self.is_outdated, self.unchanged = is_known, False, True

    @property
    def serves(self) -> bool:
        return not self.is_outdated

    def namespace(self, seconds: float = 0) -> bytes:
        return bytes(16) if self.is_known else b""

    def looked(self) -> Callable[[], bool]:
        return lambda: self.unchanged

    def note(self, payload_bytes: int) -> NamespaceNote:
        return NamespaceNote("m", "e", "l", 16, payload_bytes, 0, self.ranks, False, True, 0.0, 1)

    def end_step(self) -> None: ...

    def reset(self) -> None:
        self.is_outdated = False


class Engine:
    """vLLM's manager over `rows` rows of host memory, and its connector's calls."""

    def __init__(self, store: StoreSpec, rows: int = 8, is_known: bool = True) -> None:
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
        from vllm.v1.kv_offload.tiering.manager import (
            CPUPrimaryTierOffloadingManager,
            TieringOffloadingManager,
        )

        from tiers.engine.vllm_offloading import HostedManager, KVTiersStore

        self.hosting = hosting = cast(Any, Hosting(is_known))
        name = f"kvtiers-test-{os.getpid()}-{next(NUMBERS)}"
        primary = CPUPrimaryTierOffloadingManager(
            rows, SharedOffloadRegion(name, rows, None, ROW, ROW), "lru", None, True
        )
        self.rows = primary.get_kv_memoryview().cast("B")
        spec: Any = SimpleNamespace(kv_events_config=SimpleNamespace(enable_kv_cache_events=True))
        view = primary.get_kv_memoryview()
        self.tier = KVTiersStore(spec, view, "KVTiersStore", store=store, engine=hosting)
        self.manager = HostedManager(TieringOffloadingManager(primary, [self.tier]), hosting)
        self.contexts: dict[str, Any] = {}

    def context(self, request: str) -> Any:
        from vllm.v1.kv_offload.base import ReqContext

        if request not in self.contexts:
            context: Any = ReqContext(request)
            self.contexts[request] = context
            self.manager.on_new_request(context)
            if hasattr(context, "set_offload_key_position"):  # older versions have no places
                for place, block in enumerate(BLOCKS, 1):
                    context.set_offload_key_position(key(block), place)
        return self.contexts[request]

    def step(self, started: Sequence[str] = ()) -> None:
        """End a step in which these requests began to run."""
        self.manager.on_schedule_end(SimpleNamespace(new_req_ids=started))

    def lookup(self, block: bytes, request: str) -> str:
        return str(self.manager.lookup(key(block), self.context(request)).name)

    def settle(self) -> None:
        """Step until no transfer is in flight."""

        def is_done() -> bool:
            self.step()
            return not self.manager.has_pending_work()

        wait_for(is_done)

    def store(self, blocks: Sequence[bytes], request: str = "stores") -> int:
        """Store what vLLM's host memory has not; return how many."""
        context = self.context(request)
        output = self.manager.prepare_store([key(block) for block in blocks], context)
        assert output is not None
        for stored, row in zip(output.keys_to_store, output.store_spec.block_ids, strict=True):
            self.rows[row * ROW : (row + 1) * ROW] = content(stored)
        if output.keys_to_store:
            self.manager.complete_store(set(output.keys_to_store), context)
        return len(output.keys_to_store)

    def ask(self, request: str, blocks: Sequence[bytes]) -> list[str]:
        """Look blocks up, once a step, until the manager knows."""
        answers: list[str] = []

        def is_known() -> bool:
            answers[:] = [self.lookup(block, request) for block in blocks]
            self.step()
            return not {"RETRY", "HIT_PENDING"} & {*answers}

        wait_for(is_known)
        return answers

    def state(self) -> str:
        """That of the tier, as vLLM's metrics show it; empty: it has not changed."""
        if (stats := self.manager.get_stats()) is None:
            return ""
        shown = stats.data["data"].get("vllm:kvtiers_hosted_tier_state", {})
        return " ".join(state for (_, state), value in shown.items() if value)

    def hits(self, request: str, blocks: Sequence[bytes]) -> list[bytes]:
        """The blocks that can be loaded; they are, and are what was stored."""
        answers = zip(blocks, self.ask(request, blocks), strict=True)
        found = [block for block, answer in answers if answer == "HIT"]
        keys, context = [key(block) for block in found], self.context(request)
        rows = self.manager.prepare_load(keys, context).block_ids
        for one, row in zip(keys, rows, strict=True):
            assert bytes(self.rows[row * ROW : (row + 1) * ROW]) == content(one)
        self.manager.complete_load(keys, context)
        return found

    def finish(self, request: str) -> None:
        self.manager.on_request_finished(self.contexts.pop(request))


NUMBERS = itertools.count()


def key(block: bytes) -> Any:
    from vllm.v1.kv_offload.base import make_offload_key

    return make_offload_key(block, 0)


def content(name: bytes) -> bytes:
    return (name * (ROW // len(name) + 1))[:ROW]


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def made(store: StoreSpec, **more: Any) -> Engine:
        engines.append(Engine(store, **more))
        return engines[-1]

    yield made
    for engine in engines:
        engine.rows.release()
        engine.manager.shutdown()


@pytest.fixture
def gate() -> Gate:
    GATES.append(Gate())
    return GATES[-1]


def spec_of(**settings: Any) -> Any:
    return make_tier(settings["type"], cast("Mapping[object, object]", settings))


def disk(folder: Path, capacity: str = "8MiB") -> Any:
    return spec_of(type="disk", path=str(folder), capacity=capacity)


GATED = GateSpec(type="gate")


def test_what_host_memory_has_evicted_comes_back(
    make: Callable[..., Engine], tmp_path: Path
) -> None:
    """And what another engine has stored, as far as host memory has room for it."""
    engine = make(disk(tmp_path))
    for start in range(0, 16, 4):
        assert engine.store(BLOCKS[start : start + 4], f"stores {start}") == 4
        engine.settle()
        engine.finish(f"stores {start}")
    assert engine.hits("a", BLOCKS[:4]) == BLOCKS[:4]
    again = make(disk(tmp_path))
    assert again.hits("b", [BLOCKS[0], BLOCKS[19], BLOCKS[1]]) == [BLOCKS[0], BLOCKS[1]]


@pytest.mark.parametrize("by", ["ours", "vLLM's own"])
def test_what_a_worker_of_dynamo_measures_itself_by_is_neither_stored_nor_loaded(
    make: Callable[..., Engine], tmp_path: Path, by: str
) -> None:
    """Some of it nobody computed; its next start would find it."""
    engine = make(disk(tmp_path))
    if by != "ours":
        engine.manager = cast(Any, super(type(engine.manager), engine.manager))
    engine.store(BLOCKS[:4], "__bench_kv_seed_3_0")
    engine.store(BLOCKS[4:8], "stores")
    engine.settle()
    again = make(disk(tmp_path))
    assert again.hits("a", BLOCKS[:8]) == BLOCKS[4:8]
    assert make(disk(tmp_path)).hits("__kvwarm_chain_0", BLOCKS[:8]) == []


def counted(monkeypatch: pytest.MonkeyPatch, verb: str) -> list[int]:
    """How many blocks each call of a disk's verb is about."""
    from tiers.disk.disk_store import DiskStore

    real, sizes = getattr(DiskStore, verb), list[int]()

    def call(store: DiskStore, some: Sequence[Any]) -> Any:
        sizes.append(len(some))
        return real(store, some)

    monkeypatch.setattr(DiskStore, verb, call)
    return sizes


@pytest.mark.parametrize("is_backwards", [False, True])
@pytest.mark.parametrize(("most", "calls"), [(512, [20]), (8, [8, 8, 4])])
def test_an_index_is_asked_once_for_many_blocks_of_a_prompt(
    make: Callable[..., Engine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_backwards: bool,
    most: int,
    calls: list[int],
) -> None:
    """vLLM asks for each block, of a layer with windows from the last one on."""
    from tiers.engine import vllm_secondary_tier

    monkeypatch.setattr(vllm_secondary_tier, "LOOKED_UP", most)
    first = make(disk(tmp_path), rows=40)
    held = [*BLOCKS[:5], BLOCKS[7], BLOCKS[19]]
    first.store(held)
    first.settle()
    engine = make(disk(tmp_path), rows=40)
    engine.step()  # in which it learns that the store has an index
    peeked = counted(monkeypatch, "peek")
    asked = BLOCKS[::-1] if is_backwards else BLOCKS
    answers = [engine.lookup(block, "a") for block in asked]
    assert answers == ["HIT_PENDING" if block in held else "MISS" for block in asked]
    assert {*engine.hits("a", asked)} == {*held}
    if hasattr(context := engine.context("a"), "set_offload_key_position"):
        assert sorted(peeked) == sorted(calls)
        context.set_offload_key_position(key(bytes(32)), 21)
        assert engine.lookup(bytes(32), "a") == "MISS"
        assert peeked[len(calls) :] == [1], "of the others it is known"


class Compared(bytes):
    """A name that counts what it is compared with."""

    times = 0
    __hash__ = bytes.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return bytes(self) == other


def test_a_long_prompt_that_is_looked_up_costs_a_step_what_it_is_long(
    make: Callable[..., Engine], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not that squared: vLLM asks for each block again in each step, until all are known."""
    engine, prompt = make(GATED), [number.to_bytes(32) for number in range(300)]
    may_answer = threading.Event()
    monkeypatch.setattr(gate, "has", lambda keys: [False] * len(keys) * may_answer.wait(60))
    monkeypatch.setattr(engine.tier._generation, "key", Compared)
    try:
        for _ in range(2):
            Compared.times = 0
            assert {engine.lookup(block, "a") for block in prompt} == {"RETRY"}
            engine.step()
        assert Compared.times < 10 * len(prompt)
    finally:
        may_answer.set()


def test_an_index_that_is_gone_is_asked_for_in_the_background(
    make: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiers.disk.disk_store import DiskStore
    from tiers.store import LocalIndex

    engine = make(disk(tmp_path), rows=40)
    engine.store(BLOCKS[:5])
    engine.settle()
    engine.manager.primary_tier.reset_cache()
    real = DiskStore.capability
    monkeypatch.setattr(
        DiskStore,
        "capability",
        lambda store, kind: None if kind is LocalIndex else real(store, kind),
    )
    monkeypatch.setattr(engine.tier._manager, "_found_index", None)
    asked: list[int] = []
    manager, coverage = engine.tier._manager, engine.tier._manager.coverage

    def ask(lookup: Any, names: Sequence[bytes], numbers: range) -> Any:
        asked.append(len(names))
        return coverage(lookup, names, numbers)

    monkeypatch.setattr(manager, "coverage", ask)
    assert [engine.lookup(block, "a") for block in BLOCKS] == ["RETRY"] * 20
    if hasattr(engine.context("a"), "set_offload_key_position"):
        assert asked == [20]
    assert engine.hits("a", BLOCKS) == BLOCKS[:5]


def test_rows_that_a_store_reads_itself_are_stored_in_whole_batches(
    make: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiers.engine import vllm_secondary_tier

    monkeypatch.setattr(vllm_secondary_tier, "PART_BYTES", 4 * ROW)
    put, got = counted(monkeypatch, "put"), counted(monkeypatch, "get")
    engine = make(disk(tmp_path), rows=40)
    engine.store(BLOCKS)
    engine.settle()
    engine.manager.primary_tier.reset_cache()
    assert engine.hits("a", BLOCKS) == BLOCKS
    assert (put, got) == ([20], [4] * 5)


@pytest.mark.parametrize("requests", [1, 2, 3])
def test_more_than_host_memory_holds_is_a_miss_and_no_wait(
    make: Callable[..., Engine], tmp_path: Path, requests: int
) -> None:
    """vLLM evicts what one lookup was promised for what the next is: each would ask for ever."""
    engine = make(disk(tmp_path), rows=40)
    engine.store(BLOCKS)
    engine.settle()
    few = make(disk(tmp_path), rows=8)
    rng, waiting = random.Random(requests), [f"request {number}" for number in range(requests)]
    rounds = 0
    while waiting:
        rounds += 1
        assert rounds < 5_000, "they wait for each other"
        for request in waiting[:]:
            answers = [few.lookup(block, request) for block in BLOCKS]
            if not {"RETRY", "HIT_PENDING"} & {*answers}:
                assert answers.count("HIT") >= 4 or requests > 1
                waiting.remove(request)
        few.step()
        time.sleep(0.001)
        rng.shuffle(waiting)
    few.step(started=["request 0"])
    assert few.hits("request 0", BLOCKS[:2]) == BLOCKS[:2], "as after a preemption"


def test_damage_on_disk_is_a_miss(make: Callable[..., Engine], tmp_path: Path) -> None:
    first = make(disk(tmp_path))
    first.store(BLOCKS[:3])
    first.settle()
    (slab,) = tmp_path.glob("**/slab-*")
    at = slab.read_bytes().index(content(key(BLOCKS[1])))
    with slab.open("r+b") as file:
        file.seek(at + 100)
        file.write(b"?")
    again = make(disk(tmp_path))
    list(again.manager.take_events())
    assert again.hits("a", BLOCKS[:3]) == [BLOCKS[0], BLOCKS[2]]
    events = list(again.manager.take_events())
    (event,) = [one for one in events if one.removed and one.medium.name == "STORAGE"]
    assert event.keys == [key(BLOCKS[1])]


def test_a_killed_server_is_a_miss(make: Callable[..., Engine], server: Any) -> None:
    redis = spec_of(type="redis", url=server.url, timeout="500ms")
    engine = make(redis)
    engine.store(BLOCKS[:4])
    engine.settle()
    assert make(redis).hits("a", BLOCKS[:5]) == BLOCKS[:4]
    server.kill()
    late = make(redis)
    assert late.hits("b", BLOCKS[:5]) == []
    late.store(BLOCKS[:4])
    assert late.hits("c", BLOCKS[:5]) == BLOCKS[:4], "host memory serves on"


def test_engines_of_two_sizes_on_one_tier_are_named(
    make: Callable[..., Engine],
    shared_server: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Their rows have all ranks, so that neither could have the other's."""
    url, space = shared_server.url, str(tmp_path)
    redis = spec_of(type="redis", url=url, key_prefix=space, timeout="30s")
    monkeypatch.setattr(Hosting, "ranks", 2)
    first = make(redis)
    first.store(BLOCKS[:2])
    first.settle()
    monkeypatch.setattr(Hosting, "ranks", 1)
    make(redis)
    wait_for(lambda: "from engines of 2 rank(s), and this one has 1" in caplog.text)
    assert f"{ROW // 16}B a token" in caplog.text


def test_a_failing_store_is_a_miss(make: Callable[..., Engine], gate: Gate) -> None:
    engine = make(GATED, rows=4)
    engine.store(BLOCKS[:2])
    engine.settle()
    engine.store(BLOCKS[2:6], "other")
    gate.fails = True
    assert engine.ask("a", BLOCKS[:2]) == ["MISS", "MISS"]


@pytest.mark.fault
def test_a_load_that_hangs_is_a_miss_and_leaves_its_row_alone(
    make: Callable[..., Engine], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiers.engine import vllm_secondary_tier

    engine = make(GATED, rows=4)
    for start in range(0, 6, 2):  # each of a prompt of its own: of one vLLM 0.33 evicts the end
        engine.store(BLOCKS[start : start + 2], f"stores {start}")
        engine.settle()
        engine.finish(f"stores {start}")
    monkeypatch.setattr(vllm_secondary_tier, "LOAD_SECONDS", 0.05)
    gate.is_open.clear()
    assert engine.ask("a", BLOCKS[:1]) == ["MISS"]
    assert engine.store(BLOCKS[6:10], "third") == 4
    monkeypatch.undo()
    gate.is_open.set()
    engine.settle()
    time.sleep(0.1)
    assert engine.hits("b", BLOCKS[6:10]) == BLOCKS[6:10], "the late load has not written to them"
    assert engine.hits("b", BLOCKS[:1]) == BLOCKS[:1], "others may load it"


@pytest.mark.fault
def test_a_store_that_hangs_gives_its_rows_back(
    make: Callable[..., Engine], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiers.engine import vllm_secondary_tier

    monkeypatch.setattr(vllm_secondary_tier, "DRAIN_SECONDS", 0.05)
    engine = make(GATED, rows=8)
    gate.is_open.clear()
    engine.store(BLOCKS[:4])
    wait_for(lambda: len(gate.sizes) == 1)
    monkeypatch.setattr(vllm_secondary_tier, "STORE_SECONDS", 0.05)
    engine.settle()
    engine.manager.primary_tier.reset_cache()
    engine.rows[:] = bytes(len(engine.rows))
    sibling = Gate()
    GATES.append(sibling)
    other = make(GATED)
    other.store(BLOCKS[:4])
    other.settle()
    gate.blocks.update(sibling.blocks)  # it is one store that both share
    gate.is_open.set()
    wait_for(engine.tier._writer.submit(bool).done)
    assert engine.hits("a", BLOCKS[:4]) == BLOCKS[:4] and not gate.dropped, "they are the sibling's"


@pytest.mark.fault
@pytest.mark.parametrize("place", ["disk_store._write", "slab.Slab.write"])
def test_what_a_late_store_reads_of_another_block_is_never_served(
    make: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """It hangs before its checksum, or after it."""
    from tiers.engine import vllm_secondary_tier

    begun, gate = threading.Event(), threading.Event()
    name = f"tiers.disk.{place}"
    write = pkgutil.resolve_name(name)

    def hang(*args: Any) -> Any:
        begun.set()
        assert gate.wait(60)
        return write(*args)

    engine = make(disk(tmp_path))
    monkeypatch.setattr(name, hang)
    engine.store(BLOCKS[:4])
    assert begun.wait(20)
    monkeypatch.setattr(vllm_secondary_tier, "STORE_SECONDS", 0.05)
    engine.settle()
    engine.manager.primary_tier.reset_cache()
    engine.rows[:] = bytes(len(engine.rows))
    gate.set()
    wait_for(engine.tier._writer.submit(bool).done)
    monkeypatch.undo()
    again = make(disk(tmp_path))
    assert again.hits("a", BLOCKS[:4]) == []


def test_stores_leave_half_of_the_rows_to_loads(make: Callable[..., Engine], gate: Gate) -> None:
    engine = make(GATED, rows=8)
    gate.is_open.clear()
    engine.store(BLOCKS[:3], "one")
    engine.store(BLOCKS[3:8], "two")
    gate.is_open.set()
    engine.settle()
    assert len(gate.blocks) == 4


def test_a_reset_waits_for_no_store_and_nothing_older_is_found(
    make: Callable[..., Engine], gate: Gate, tmp_path: Path
) -> None:
    engine = make(GATED)
    engine.store(BLOCKS[:2])
    engine.settle()
    gate.is_open.clear()
    engine.store(BLOCKS[2:4], "running")
    wait_for(lambda: len(gate.sizes) == 2)
    engine.manager.reset_cache()
    assert engine.store(BLOCKS[2:4], "running") == 0, "it was computed before the reset"
    gate.is_open.set()
    assert engine.hits("new", BLOCKS[:4]) == []
    assert engine.store(BLOCKS[:4], "new") == 4
    engine.settle()
    assert engine.hits("newer", BLOCKS[:4]) == BLOCKS[:4]


def test_an_engine_that_is_outdated_serves_and_keeps_nothing_until_a_reset(
    make: Callable[..., Engine], gate: Gate
) -> None:
    engine = make(GATED)
    engine.store(BLOCKS[:2])
    engine.settle()
    assert [engine.state(), engine.state()] == ["open", ""]
    engine.hosting.is_outdated = True
    assert engine.state() == "down"
    assert engine.hits("a", BLOCKS[:2]) == []
    assert engine.tier.lookup(key(BLOCKS[0]), engine.context("a")).name == "MISS"
    assert engine.store(BLOCKS[2:4], "a") == 0
    engine.manager.reset_cache()
    assert not engine.hosting.is_outdated and engine.state() == "open"
    assert engine.hits("b", BLOCKS[:4]) == []


def test_a_look_at_other_weights_neither_stores_nor_loads(
    make: Callable[..., Engine], gate: Gate
) -> None:
    engine, sibling = make(GATED), make(GATED)
    engine.hosting.unchanged = False
    engine.store(BLOCKS[:2])
    engine.settle()
    assert gate.sizes == []
    sibling.store(BLOCKS[:2])
    sibling.settle()
    other = make(GATED)
    other.hosting.unchanged = False
    assert other.hits("loads", BLOCKS[:2]) == []
    other.hosting.unchanged = True
    assert other.hits("again", BLOCKS[:2]) == BLOCKS[:2]


def test_a_store_joins_once_the_weights_are_identified(
    make: Callable[..., Engine], tmp_path: Path
) -> None:
    first = make(disk(tmp_path))
    first.store(BLOCKS[:2])
    first.settle()
    late = make(disk(tmp_path), is_known=False)
    assert late.hits("a", BLOCKS[:2]) == [] and late.state() == "opening"
    late.hosting.is_known = True

    def has_joined() -> bool:
        late.step()
        return late.tier._store is not None

    wait_for(has_joined)
    assert late.hits("a", BLOCKS[:2]) == BLOCKS[:2] and late.state() == "open"


def test_a_prefix_that_came_in_steps_is_evicted_from_its_tail(
    make: Callable[..., Engine], tmp_path: Path
) -> None:
    """The disk has room for eight of them."""
    from tiers.disk.slab import slot_bytes

    capacity = str(8 * slot_bytes(ROW))
    engine = make(disk(tmp_path, capacity))
    for at in range(6):
        engine.store(BLOCKS[at : at + 1], "prefix")
        engine.settle()
    engine.finish("prefix")
    engine.store(BLOCKS[10:14], "other")
    engine.settle()
    fresh = make(disk(tmp_path, capacity))
    assert fresh.hits("a", BLOCKS[:6]) == BLOCKS[:4]


@pytest.mark.parametrize("verb", ["put", "get"])
def test_batches_are_bounded(make: Callable[..., Engine], gate: Gate, verb: str) -> None:
    engine = make(GATED, rows=300)
    names = [bytes([number]) * 32 for number in range(150)]
    engine.store(names)
    engine.settle()
    if verb == "get":
        gate.sizes.clear()
        engine.manager.primary_tier.reset_cache()
        assert len(engine.hits("a", names)) == 150
    # Two threads load one request: the smaller batch may begin before the last large one.
    assert sorted(gate.sizes) == [22, 64, 64]


def test_events_and_metrics_have_vllms_names(make: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make(
        spec_of(
            type="disk", name="nvme", path=str(tmp_path), capacity="8MiB", store_process="always"
        )
    )
    assert engine.tier.tier_type == "nvme"
    engine.store(BLOCKS[:2])
    engine.settle()
    told = [(e.medium.name, len(e.keys), e.removed) for e in engine.manager.take_events()]
    assert told == [("CPU", 2, False), ("STORAGE", 2, False)]
    engine.manager.primary_tier.reset_cache()
    assert engine.hits("a", BLOCKS[:2]) == BLOCKS[:2]
    if hasattr(engine.manager, "get_load_source"):
        assert engine.manager.get_load_source(key(BLOCKS[0]), engine.context("a")).value == "disk"


def test_a_copy_of_a_row_that_vllm_has_taken_back_is_refused() -> None:
    """Another process stores it, by a checksum of its own."""
    from tiers.engine.vllm_secondary_tier import RowBlock, RowJob

    job: Any = RowJob(cast(Any, None), [(b"key", 0)], b"", 1)
    block = RowBlock(b"key", memoryview(bytes(ROW)), job, 0)
    assert block.checksum_of_copy() is None
    job.end()
    with pytest.raises(RecordError, match="taken the row back"):
        block.checksum_of_copy()


@pytest.mark.parametrize(
    "store", [{"type": "cpu", "capacity": "1MiB"}, {"type": "disk", "store_threshold": 2}]
)
def test_what_vllm_does_not_obey_is_refused(store: dict[str, Any], tmp_path: Path) -> None:
    from tiers.engine.vllm_offloading import KVTiersStore

    if store["type"] == "disk":
        store = {**store, "path": str(tmp_path), "capacity": "8MiB"}
    unused: Any = None
    with pytest.raises(ValueError, match=r"is no store|store_threshold, which vLLM's"):
        KVTiersStore(unused, unused, "KVTiersStore", store=store)
