"""A store's blocks: each wave is copied while the next is read, and no memory has two readers."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from tests.support.clock import wait_for
from tiers.concurrency.rate_limit import RateLimit
from tiers.connector.worker import loading as loading_module
from tiers.connector.worker.host_slots import HostSlots
from tiers.connector.worker.loading import EndedLoad, Load, Loading, Piece
from tiers.connector.worker.weight_watch import WeightWatch
from tiers.contract.block_copier import ENDED, Copy, Fence
from tiers.contract.messages import LoadItem, LoadJob
from tiers.contract.weight_reports import Weights
from tiers.errors import TierUnusable
from tiers.host.slot_memory import SlotMemory
from tiers.host.slots import slot_stride
from tiers.store import Block, time_left
from tiers.wrappers.guard import HEALTHY, Guarded

PAYLOAD = 4096
ROWS = 2
"""Blocks of a wave."""
WAIT_S = 10.0


class Host:
    """An engine whose paged KV is one number for each block."""

    payload_bytes = PAYLOAD
    pin, device = False, None
    cpus = frozenset[int]()

    def __init__(self) -> None:
        self.seconds = 0.0
        self.paged: dict[int, int] = {}
        self.memory = SlotMemory(200, PAYLOAD, pin=False)
        for slot in range(200):
            self.memory.rows[slot, 0] = slot
        self.lacks: set[int] = set()
        self.copies: list[list[int]] = []
        self.before_copy: Callable[[], object] = int
        self.watch = WeightWatch(Weights(), 1)

    @property
    def copier(self) -> Host:
        return self

    def now(self) -> float:
        return self.seconds

    def wait_and_verify(self, slots: Sequence[int], keys: Sequence[bytes]) -> list[bool]:
        return [slot not in self.lacks for slot in slots]

    def scatter(
        self, rows: torch.Tensor, slots: Sequence[int], blocks: Sequence[int], after: Fence
    ) -> Copy:
        self.before_copy()
        self.copies.append([*blocks])
        self.paged.update({block: int(rows[s, 0]) for s, block in zip(slots, blocks, strict=True)})
        return ENDED


class Store:
    """Each block is its key's number. Lacks the keys in `lacks`; reads of those in `gates` wait
    until these are open. `before_read` is called with the number of blocks."""

    health = HEALTHY

    def __init__(self) -> None:
        self.lacks: set[bytes] = set()
        self.gates: dict[bytes, threading.Event] = {}
        self.reads: list[list[bytes]] = []
        self.before_read: Callable[[int], object] = int
        self._filling: set[int] = set()
        self._lock = threading.Lock()

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        self.before_read(len(blocks))
        keys = [block.key[-3:] for block in blocks]
        memory = {id(block.payload.obj) for block in blocks}
        with self._lock:
            assert not self._filling & memory, "another read fills the same memory"
            self._filling |= memory
            self.reads.append(keys)
        for key in self.gates.keys() & set(keys):
            assert self.gates[key].wait(WAIT_S)
        for block, key in zip(blocks, keys, strict=True):
            if key not in self.lacks:
                block.payload[:1] = bytes([int(key)])
        with self._lock:
            self._filling -= memory
        return [key not in self.lacks for key in keys]


def job(number: int, *keys: bytes, seconds: float = math.inf) -> LoadJob:
    items = [LoadItem(key, int(key), None) for key in keys]
    return LoadJob(number, f"{number}", items, seconds)


def keys(first: int, count: int) -> list[bytes]:
    return [b"%03d" % number for number in range(first, first + count)]


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def loading(host: Host, store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loading]:
    monkeypatch.setattr(loading_module, "READ_BYTES", ROWS * slot_stride(PAYLOAD))
    made = Loading("test", cast(HostSlots, host), RateLimit(None), verify=False)
    made.open()
    made.serve(cast(Guarded, store), b"namespace-16-byt")
    yield made
    for gate in store.gates.values():
        gate.set()
    made.close(WAIT_S)


def ended(loading: Loading, count: int) -> list[EndedLoad]:
    found: list[EndedLoad] = []

    def are_ended() -> bool:
        found.extend(loading.ended(idle=True))
        return len(found) >= count

    wait_for(are_ended)
    return found


def test_a_wave_is_copied_while_the_next_is_read(
    loading: Loading, host: Host, store: Store
) -> None:
    store.gates = {b"002": threading.Event()}

    def while_the_next_is_read() -> None:
        wait_for(lambda: keys(2, 2) in store.reads)
        store.gates[b"002"].set()

    host.before_copy = while_the_next_is_read
    loading.begin([job(0, *keys(0, 7))], ENDED)
    (load,) = ended(loading, 1)
    assert load.result.failed == set() and host.paged == {n: n for n in range(7)}
    assert store.reads == [keys(0, 2), keys(2, 2), keys(4, 2), keys(6, 1)]


def test_nothing_behind_a_wave_that_lacks_a_block_is_copied(
    loading: Loading, host: Host, store: Store
) -> None:
    store.lacks = {b"003"}
    loading.begin([job(0, *keys(0, 8))], ENDED)
    (load,) = ended(loading, 1)
    assert load.result.failed == {3, 4, 5, 6, 7} and load.result.lost == {3}
    assert host.paged == {n: n for n in range(3)}
    assert store.reads == [keys(0, 2), keys(2, 2)]


def test_nothing_behind_a_wave_of_host_memory_that_lacks_a_block_is_copied(
    loading: Loading, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading_module, "WAVE_BYTES", 2 * slot_stride(PAYLOAD))
    host.lacks = {3}
    loading.begin([resident(0, 0, 8)], ENDED)
    (load,) = ended(loading, 1)
    assert load.result.failed == {3, 4, 5, 6, 7} and load.result.lost == {3}
    assert host.copies == [[0, 1], [2]]


def test_a_load_ends_behind_a_copy_that_begins() -> None:
    """Its blocks are others' from then on."""
    load = Load(job(0, b"000"), now=float)
    ends = threading.Thread(target=load.end)

    def begin(pieces: Sequence[Piece]) -> Copy:
        ends.start()
        ends.join(0.05)
        assert not load.is_over
        return ENDED

    Load.copy_in([Piece(load, 0, 0, 0)], begin)
    ends.join(WAIT_S)
    assert load.is_over and load.arrived == 1
    Load.copy_in([Piece(load, 0, 0, 0)], begin)


def test_the_memory_of_a_load_that_ended_early_is_nobodys_while_it_is_read_into(
    loading: Loading, host: Host, store: Store
) -> None:
    halted, second = threading.Event(), threading.Event()
    store.gates = {b"002": second}

    class Halts:
        """A fence at which the load is ended, once its second wave is being read."""

        def wait(self) -> None:
            wait_for(lambda: keys(2, 2) in store.reads)
            loading.halt()
            halted.set()

    loading.begin([job(0, *keys(0, 4))], Halts())
    assert halted.wait(WAIT_S)
    others = [job(1 + n, *keys(100 + 10 * n, 5)) for n in range(4)]
    loading.begin(others, ENDED)
    wait_for(lambda: loading._loads[-1][1].done())
    second.set()
    results = {load.job.job_id: load.result for load in ended(loading, 5)}
    assert {number for number, result in results.items() if result.failed} == {0}
    assert all(host.paged[item.target] == item.target for one in others for item in one.items)


def test_as_many_loads_run_as_the_tier_may_have_at_once(host: Host, store: Store) -> None:
    store.gates = {key: threading.Event() for key in keys(0, 5)}
    made = Loading("test", cast(HostSlots, host), RateLimit(None), verify=False, at_once=4)
    made.open()
    made.serve(cast(Guarded, store), b"namespace-16-byt")
    try:
        made.begin([job(int(key), key) for key in store.gates], ENDED)
        wait_for(lambda: len(store.reads) == 4)
        assert not [load for load in made.ended(idle=True) if load.result.failed]
        assert len(store.reads) == 4, "the fifth waits for its turn"
        for gate in store.gates.values():
            gate.set()
        assert not any(load.result.failed for load in ended(made, 5))
    finally:
        made.close(WAIT_S)


@pytest.mark.fault
def test_what_came_before_the_end_of_a_load_is_used_and_the_rest_is_no_miss(
    loading: Loading, host: Host, store: Store
) -> None:
    def comes_late(_: int) -> None:
        assert 0 < time_left() < 3
        host.seconds += 2.99
        store.lacks = {b"001"}  # as far as it had time to say
        assert time_left() == 0

    store.before_read = comes_late
    loading.begin([job(0, *keys(0, 6), seconds=3)], ENDED)
    (load,) = ended(loading, 1)
    assert host.paged == {0: 0}
    assert load.result.failed == {1, 2, 3, 4, 5}
    assert load.result.late and not load.result.lost
    assert store.reads == [keys(0, 2)]


def test_a_store_sees_that_its_load_has_ended(loading: Loading, host: Host, store: Store) -> None:
    left: list[float] = []

    def is_ended(_: int) -> None:
        left.append(time_left())
        loading.halt()
        left.append(time_left())

    store.before_read = is_ended
    loading.begin([job(0, *keys(0, 4))], ENDED)
    ended(loading, 1)
    assert left == [math.inf, 0]
    assert not host.paged


def test_nothing_is_read_without_time(loading: Loading, host: Host, store: Store) -> None:
    store.gates = {b"100": threading.Event(), b"110": threading.Event()}
    loading.begin([job(1, b"100"), job(2, b"110")], ENDED)
    wait_for(lambda: [b"100"] in store.reads and [b"110"] in store.reads)
    loading.begin([job(3, *keys(0, 2), seconds=3)], ENDED)
    host.seconds += 2.99
    for gate in store.gates.values():
        gate.set()
    results = {load.job.job_id: load.result for load in ended(loading, 3)}
    assert results[3].late and results[3].failed == {0, 1} and not results[3].lost
    assert keys(0, 2) not in store.reads


def test_a_load_that_can_not_end_in_time_gives_way_to_one_that_waits(
    loading: Loading, host: Host, store: Store
) -> None:
    learn(loading, host, store, each=1.0)
    store.gates = {key: threading.Event() for key in (b"100", b"110", b"130")}
    loading.begin([job(1, b"100"), job(2, b"110")], ENDED)
    wait_for(lambda: [b"100"] in store.reads and [b"110"] in store.reads)
    loading.begin([job(3, *keys(120, 8), seconds=3), job(4, b"130")], ENDED)
    store.gates[b"100"].set()
    wait_for(lambda: [b"130"] in store.reads)
    assert keys(120, 2) not in store.reads
    for gate in store.gates.values():
        gate.set()
    results = {load.job.job_id: load.result for load in ended(loading, 4)}
    assert {number for number, result in results.items() if result.failed} == {3}
    assert results[3].late and results[3].seconds == 0


def test_a_load_that_nobody_waits_behind_is_begun_however_slow_the_tier_was(
    loading: Loading, host: Host, store: Store
) -> None:
    """Short loads say little of a long one; and a probe tells whether the tier is quick again."""
    learn(loading, host, store, each=1.0)
    store.before_read = int
    loading.begin([job(1, *keys(120, 8), seconds=3)], ENDED)
    (load,) = ended(loading, 1)
    assert not load.result.failed


def test_short_loads_of_a_far_tier_do_not_keep_a_long_one_from_its_turn(
    loading: Loading, host: Host, store: Store
) -> None:
    """A read takes a second, whatever it brings."""
    learn(loading, host, store, fixed=1.0)
    store.gates = {key: threading.Event() for key in (b"100", b"110", b"130")}
    loading.begin([job(1, b"100"), job(2, b"110")], ENDED)
    wait_for(lambda: [b"100"] in store.reads and [b"110"] in store.reads)
    loading.begin([job(3, *keys(120, 8), seconds=3), job(4, b"130")], ENDED)
    store.gates[b"100"].set()
    wait_for(lambda: [b"130"] in store.reads)
    for gate in store.gates.values():
        gate.set()
    ended(loading, 4)
    assert keys(120, 2) in store.reads


def learn(
    loading: Loading, host: Host, store: Store, fixed: float = 0.0, each: float = 0.0
) -> None:
    """Load one block, or two, again and again; a read takes `fixed` seconds and `each` a block."""

    def take_time(blocks: int) -> None:
        host.seconds += fixed + blocks * each

    store.before_read = take_time
    for number in range(8):
        loading.begin([job(100 + number, *keys(1, 1 + number % 2))], ENDED)
        ended(loading, 1)


def resident(number: int, first: int, count: int, generation: bytes = b"") -> LoadJob:
    """A job whose blocks are in the slots of their numbers."""
    items = [LoadItem(key, int(key), int(key)) for key in keys(first, count)]
    return LoadJob(number, f"{number}", items, math.inf, generation=generation)


def test_small_loads_of_a_step_are_copied_together(loading: Loading, host: Host) -> None:
    """One by one each would cost its waits for the device, and the engine a step."""
    host.lacks = {21}
    jobs = [resident(0, 10, 2), resident(1, 20, 3), resident(2, 30, 1)]
    loading.begin(jobs, ENDED)
    results = {load.job.job_id: load.result for load in ended(loading, 3)}
    assert host.copies == [[10, 11, 20, 22, 30]]
    assert {number: result.failed for number, result in results.items()} == {
        0: set(),
        1: {1},
        2: set(),
    }
    assert results[1].lost == {1}
    assert host.paged == {n: n for n in (10, 11, 20, 22, 30)}


def test_many_loads_are_looked_at_once_each(loading: Loading, host: Host) -> None:
    """By the engine's thread: a thousand begin in one step."""
    looks = 0

    class Items(list[LoadItem]):
        def __iter__(self) -> Iterator[LoadItem]:
            nonlocal looks
            looks += 1
            return super().__iter__()

    jobs = [resident(number, number, 1) for number in range(100)]
    loads = [Load(replace(one, items=Items(one.items)), host.now) for one in jobs]
    assert [len(group) for group in loading._groups(loads)] == [100]
    assert looks == 100


def test_what_is_copied_together_fits_one_wave_and_one_generation(
    loading: Loading, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading_module, "WAVE_BYTES", 4 * slot_stride(PAYLOAD))
    monkeypatch.setattr(loading, "_at_once", 1)
    jobs = [resident(0, 10, 3), resident(1, 20, 2), resident(2, 30, 2), resident(3, 40, 9)]
    others = [job(4, *keys(60, 1)), resident(5, 70, 1), resident(6, 80, 1, b"of other weights")]
    loading.begin([*jobs, *others], ENDED)
    results = ended(loading, 7)
    assert not any(load.result.failed for load in results)
    assert sorted(host.copies) == [
        [10, 11, 12],
        [20, 21, 30, 31],
        [40, 41, 42, 43],
        [44, 45, 46, 47],
        [48],
        [60],
        [70],
        [80],
    ]


def test_a_load_that_is_given_up_leaves_those_beside_it(loading: Loading, host: Host) -> None:
    """Its blocks may be another's by then, whether it waits or has begun."""
    stop, begun = threading.Event(), threading.Event()

    class Held:
        def wait(self) -> None:
            begun.set()
            assert stop.wait(WAIT_S)

    short = replace(resident(1, 20, 3), seconds=1.0)
    loading.begin([resident(0, 10, 2), short, resident(2, 30, 1)], cast(Fence, Held()))
    assert begun.wait(WAIT_S)
    host.seconds = 2.0
    (late,) = loading.ended(idle=False)
    assert late.job == short and late.result.failed == {0, 1, 2}
    stop.set()
    assert not any(load.result.failed for load in ended(loading, 2))
    assert host.copies == [[10, 11, 30]]


def test_a_load_whose_time_is_over_before_its_turn_leaves_those_beside_it(
    loading: Loading, host: Host, store: Store
) -> None:
    store.gates = {key: threading.Event() for key in (b"100", b"110")}
    loading.begin([job(8, b"100"), job(9, b"110")], ENDED)
    wait_for(lambda: len(store.reads) == 2)
    short = replace(resident(1, 20, 3), seconds=1.0)
    loading.begin([resident(0, 10, 2), short], ENDED)
    host.seconds = 2.0
    (late,) = loading.ended(idle=False)
    assert late.job == short and late.result.failed == {0, 1, 2}
    for gate in store.gates.values():
        gate.set()
    assert not any(load.result.failed for load in ended(loading, 3))
    assert [10, 11] in host.copies and 20 not in host.paged


def noted_memory(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> tuple[list[SlotMemory], list[SlotMemory]]:
    """The bounces that are made from now on, `most` at most, and those that are closed."""
    made: list[SlotMemory] = []
    closed: list[SlotMemory] = []

    class Noted(SlotMemory):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if len(made) == most:
                raise TierUnusable("short")
            super().__init__(*args, **kwargs)
            made.append(self)

        def close(self) -> None:
            closed.append(self)
            super().close()

    monkeypatch.setattr(loading_module, "SlotMemory", Noted)
    return made, closed


@pytest.mark.parametrize(("fit", "rows"), [(0, 1), (3, 3), (4, 4), (9, 8), (70, 64)])
def test_each_reader_of_a_disk_has_as_many_blocks_of_a_piece(
    host: Host, monkeypatch: pytest.MonkeyPatch, fit: int, rows: int
) -> None:
    monkeypatch.setattr(loading_module, "READ_BYTES", fit * slot_stride(PAYLOAD))
    made, _ = noted_memory(monkeypatch, 64)
    loading = Loading("test", cast(HostSlots, host), RateLimit(None), verify=False)
    loading.open()
    loading.close(WAIT_S)
    assert {len(bounce.rows) for bounce in made} == {rows}


def test_memory_that_is_had_before_it_is_short_is_given_back(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stays pinned is another's to pin no more."""
    made, closed = noted_memory(monkeypatch, loading_module.BOUNCES + 1)
    loading = Loading("test", cast(HostSlots, host), RateLimit(None), verify=False)
    with pytest.raises(TierUnusable, match="no memory to load its blocks through: short"):
        loading.open()
    loading.close(WAIT_S)
    assert closed == made != []


def test_memory_of_a_read_that_hangs_is_unpinned_when_it_returns(
    host: Host, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tier has left the chain meanwhile: no load is in flight any more."""
    made, closed = noted_memory(monkeypatch, 100)
    loading = Loading("test", cast(HostSlots, host), RateLimit(None), verify=False)
    loading.open()
    loading.serve(cast(Guarded, store), b"namespace-16-byt")
    gate = store.gates[b"001"] = threading.Event()
    loading.begin([job(0, b"001", seconds=1.0)], ENDED)
    wait_for(lambda: [b"001"] in store.reads)
    host.seconds = 2.0
    assert loading.ended(idle=False)[0].result.late
    loading.close(WAIT_S)
    assert len(closed) == len(made) - loading_module.BOUNCES
    gate.set()
    wait_for(lambda: len(closed) == len(made))
