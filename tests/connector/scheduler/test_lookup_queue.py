"""Lookups past what a store can answer: what nobody waits for is never asked, in one call each."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from math import ceil
from types import SimpleNamespace

import pytest

from spec.chain import ChainSpec
from tests.support.clock import Clock, wait_for
from tests.support.fake_requests import BLOCKS, IDLE_STEP, FakeRequest, first_step
from tiers.concurrency.executors import IDLE_WAIT
from tiers.connector.assembly import scheduler_parts
from tiers.connector.multi.multi_connector import MultiWorkerMetadata
from tiers.connector.multi.multi_scheduler import MultiScheduler
from tiers.connector.policy.request_state import LOOKUP_SECONDS
from tiers.connector.scheduler.lookup_queue import LookupQueue
from tiers.connector.scheduler.lookups import Lookup
from tiers.connector.scheduler.store_manager import StoreManager
from tiers.contract.engine_info import EngineInfo
from tiers.contract.generation import Generation
from tiers.contract.messages import OffloadingWorkerMetadata, WorkerHandshake
from tiers.store import TierStore
from tiers.testing import GivenSpec, MemoryStore
from tiers.wrappers.guard import Guarded

SPACE = b"space"
THREADS = LookupQueue.THREADS
BURST = LookupQueue.BURST_PART * LOOKUP_SECONDS
SHORT = LookupQueue.STANDING_WAIT
STEP = 0.005


class Hanging(MemoryStore):
    """Holds everything. Lookups hang until `go` is set; `calls` are those that have begun."""

    peek = None  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[bytes]] = []
        self.go = threading.Event()

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        self.calls.append(list(keys))
        assert self.go.wait(20)
        return [True] * len(keys)

    def close(self) -> None:
        self.go.set()


class Asking:
    """A manager over that store, and its clock."""

    def __init__(self, *spaces: bytes) -> None:
        self.store, self.clock = Hanging(), Clock()
        self.manager = StoreManager(
            Guarded(self.store, "tier"), spaces or [SPACE], Generation(), self.clock
        )

    def ask(self, key: bytes) -> Lookup:
        """Begin to look a key up."""
        lookup = Lookup()
        self.manager.prefetch_lookup(lookup, [key])
        return lookup

    def poll(self, lookup: Lookup, key: bytes) -> bool | None:
        """Whether the key is held; None: not known yet."""
        held = self.manager.coverage(lookup, [key], range(1))
        return None if held is None else held[0]

    def pass_time(self, seconds: float) -> None:
        """An engine of short steps asks for something that is there, in each."""
        for _ in range(round(seconds / STEP)):
            self.clock.now += STEP
            self.manager.wait_a_moment()

    def occupy(self) -> None:
        """Have every thread hang in a lookup."""
        begun = len(self.store.calls)
        for number in range(THREADS):
            self.ask(b"busy %d" % number)
        wait_for(lambda: len(self.store.calls) == begun + THREADS)

    def answer_all(self) -> None:
        """Let all go on, until what comes last is answered."""
        self.store.go.set()
        last = [self.ask(b"last") for _ in range(THREADS)]
        wait_for(lambda: all(one.asked is not None and one.asked.answer.done() for one in last))

    @property
    def asked(self) -> set[bytes]:
        """Keys that the store was asked for."""
        return {key.removeprefix(SPACE) for call in list(self.store.calls) for key in call}


@pytest.fixture
def asking() -> Iterator[Asking]:
    made = Asking()
    yield made
    made.manager.close()


@pytest.mark.fault
def test_what_was_waited_for_in_vain_is_never_asked(asking: Asking) -> None:
    asking.occupy()
    waiting = asking.ask(b"waits")
    assert asking.poll(waiting, b"waits") is None
    asking.clock.now += 1.0
    assert asking.poll(waiting, b"waits") is False
    assert waiting.is_unanswered, "it is no miss of the store's"
    asking.answer_all()
    assert b"waits" not in asking.asked


def test_what_is_given_up_is_asked_again_when_an_answer_would_be_old(asking: Asking) -> None:
    asking.occupy()
    waiting = asking.ask(b"waits")
    asking.clock.now += 1.0
    for _ in range(2):
        assert asking.poll(waiting, b"waits") is False
    asking.answer_all()
    assert asking.poll(waiting, b"waits") is False, "an engine that waits for room asks each step"
    asking.clock.now += StoreManager.LOOKUP_LIFETIME + 0.1
    asking.poll(waiting, b"waits")
    wait_for(lambda: asking.poll(waiting, b"waits") is True)


@pytest.mark.parametrize("begins", [True, False], ids=["begins", "asks anew"])
def test_what_a_request_needs_no_more_is_never_asked(asking: Asking, begins: bool) -> None:
    asking.occupy()
    lookup = asking.ask(b"waits")
    if begins:
        lookup.cancel()
    else:
        lookup.renew()
    assert lookup.asked is None, "a request that was preempted asks anew"
    asking.answer_all()
    assert b"waits" not in asking.asked


def test_an_answer_that_is_there_outlives_the_beginning(asking: Asking) -> None:
    asking.store.go.set()
    lookup = asking.ask(b"a")
    wait_for(lambda: asking.poll(lookup, b"a") is True)
    lookup.cancel()
    assert asking.poll(lookup, b"a") is True
    assert len(asking.store.calls) == 1


def open_chain(*stores: TierStore, clock: Clock | None = None) -> MultiScheduler:
    """The scheduler half of a chain of these stores, the uppermost first."""
    tiers = tuple(GivenSpec(type=f"tier-{n}").over(store) for n, store in enumerate(stores))
    spec = ChainSpec(
        version=1, load_when="always", staging=1 << 20, load_policy="first", tiers=tiers
    )
    engine = EngineInfo({}, 16, 16, num_blocks=1)
    chain = MultiScheduler(*scheduler_parts(spec, engine, clock or Clock()))
    said = OffloadingWorkerMetadata(handshakes={0: WorkerHandshake(0, SPACE * 8, 4096)})
    meta = MultiWorkerMetadata((said,) * len(stores))
    output = SimpleNamespace(kv_connector_worker_meta=meta, finished_recving=None)
    chain.update_connector_output(output)
    return chain


def request_of(number: int) -> FakeRequest:
    """A request of one full block."""
    return FakeRequest(f"{number}", 17, [bytes([number]) * 32])


def test_a_request_that_begins_takes_its_question_back() -> None:
    below = Hanging()
    chain = open_chain(MemoryStore(), below)
    try:
        requests = [request_of(number) for number in range(THREADS + 8)]
        for request in requests[:THREADS]:
            chain.on_new_request(request)
        wait_for(lambda: len(below.calls) == THREADS)
        for request in requests[THREADS:]:
            chain.on_new_request(request)
        for request in requests:
            chain.update_state_after_alloc(request, BLOCKS, 0)
        below.go.set()
        last = request_of(255)
        chain.on_new_request(last)
        wait_for(lambda: chain.get_num_new_matched_tokens(last, 0)[0] is not None)
    finally:
        chain.shutdown()
    assert len(below.calls) == THREADS + 1


def test_a_request_that_waited_in_vain_is_counted_once() -> None:
    store, clock, request = Hanging(), Clock(), request_of(0)
    chain = open_chain(store, clock=clock)
    try:
        chain.on_new_request(request)
        assert chain.get_num_new_matched_tokens(request, 0) == (None, False)
        clock.now += 1.0
        for _ in range(2):
            assert chain.get_num_new_matched_tokens(request, 0) == (0, False)
        stats = chain.get_kv_connector_stats()
    finally:
        store.go.set()
        chain.shutdown()
    assert stats.data["tier-0"]["lookup_timeouts"] == 1


def test_ranks_are_asked_for_in_one_call() -> None:
    asking = Asking(b"rank 0 ", b"rank 1 ", b"rank 2 ")
    has = asking.store.has

    def without_one(keys: Sequence[bytes]) -> list[bool]:
        return [held and key != b"rank 1 b" for key, held in zip(keys, has(keys), strict=True)]

    asking.store.has = without_one  # type: ignore[method-assign]
    asking.store.go.set()
    try:
        lookup, keys = Lookup(), [b"a", b"b", b"c"]
        asking.manager.prefetch_lookup(lookup, keys)
        wait_for(lambda: asking.manager.coverage(lookup, keys, range(3)) is not None)
        assert asking.manager.coverage(lookup, keys, range(3)) == [True, False, True]
        assert asking.manager.holds(keys) == [True, False, True]
    finally:
        asking.manager.close()
    ranks = [b"rank %d " % rank + key for rank in range(3) for key in keys]
    assert asking.store.calls == [ranks, ranks]


def test_what_came_first_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LookupQueue, "THREADS", 1)
    asking = Asking()
    try:
        first = asking.ask(b"0")
        wait_for(lambda: bool(asking.store.calls))
        others = [asking.ask(b"%d" % number) for number in range(1, 9)]
        others[3].cancel()
        asking.store.go.set()
        wait_for(lambda: asking.poll(others[-1], b"8") is True)
        assert asking.poll(first, b"0") is True
    finally:
        asking.manager.close()
    order = [key.removeprefix(SPACE) for call in asking.store.calls for key in call]
    assert order == [b"%d" % number for number in (0, 1, 2, 3, 5, 6, 7, 8)]


def test_a_burst_waits_and_a_standing_queue_does_not(asking: Asking) -> None:
    asking.occupy()
    burst = [asking.ask(b"burst %d" % number) for number in range(3)]
    asking.pass_time(BURST - 0.1)
    assert [asking.poll(one, b"") for one in burst] == [None] * 3, "it was empty of late"
    asking.pass_time(0.1)
    assert [asking.poll(one, b"") for one in burst] == [False] * 3, "it stands"
    late = asking.ask(b"late")
    asking.pass_time(SHORT)
    assert asking.poll(late, b"") is None
    asking.pass_time(SHORT + 3 * STEP)
    assert asking.poll(late, b"") is False
    asking.answer_all()
    assert not asking.asked & {b"late", *(b"burst %d" % number for number in range(3))}


def test_what_an_idle_engine_paused_is_no_step_for_long(asking: Asking) -> None:
    asking.clock.now += 100.0
    asking.occupy()
    asking.ask(b"burst")
    asking.pass_time(2 * BURST)
    late = asking.ask(b"late")
    asking.pass_time(2 * SHORT + 3 * STEP)
    assert asking.poll(late, b"late") is False


def test_in_long_steps_a_standing_queue_waits_for_the_next_one(asking: Asking) -> None:
    """Whatever a thread answers meanwhile is heard only then."""
    asking.occupy()
    burst = asking.ask(b"burst")
    asking.pass_time(BURST)
    assert asking.poll(burst, b"burst") is False
    asking.clock.now += 0.2
    late = asking.ask(b"late")
    asking.clock.now += 0.2
    assert asking.poll(late, b"late") is None


def test_a_long_step_counts_for_a_while(asking: Asking) -> None:
    """Within a long step an engine asks many times in a row."""
    asking.clock.now += 0.2
    asking.manager.wait_a_moment()
    for _ in range(round(BURST / STEP)):
        asking.pass_time(STEP)
        assert asking.manager._queue._soon() >= 0.2


class Timed(MemoryStore):
    """Holds all but `y`; a lookup takes `SECONDS` of a clock. One at a time, when `go` is set."""

    SECONDS = 0.0043
    peek = None  # type: ignore[assignment]

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.go = clock, threading.Event()
        self.calls: list[list[bytes]] = []
        self.error = ""

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        self.calls.append(list(keys))
        assert self.go.wait(20)
        if self.error:
            raise RuntimeError(self.error)
        self.clock.now += self.SECONDS
        return [key != b"y" for key in keys]

    def close(self) -> None:
        self.go.set()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LookupQueue, Timed]]:
    """One thread that hangs in a lookup; it has made ten others."""
    monkeypatch.setattr(LookupQueue, "THREADS", 1)
    store = Timed(Clock())
    queue = LookupQueue(
        lambda some: store.has([key for keys in some for key in keys]), LOOKUP_SECONDS, store.clock
    )
    store.go.set()
    for _ in range(10):
        assert queue.ask([b"a"], 0).answer.result(20) == [True]
    store.go.clear()
    queue.ask([b"hangs"], 0)
    wait_for(lambda: len(store.calls) == 11)
    yield queue, store
    store.close()
    queue.threads.shutdown()


def refused(queue: LookupQueue, count: int) -> list[bool]:
    """Which questions are refused, of so many at once."""
    return [queue.ask([b"%d" % number], 0).answer.cancelled() for number in range(count)]


def test_of_a_burst_what_is_answered_in_time_is_taken(timed: tuple[LookupQueue, Timed]) -> None:
    queue, store = timed
    answered = ceil(BURST / store.SECONDS)
    assert refused(queue, answered + 5) == [False] * answered + [True] * 5
    store.go.set()
    wait_for(lambda: [b"%d" % (answered - 1)] == store.calls[-1][-1:])
    queue.ask([b"last"], 0).answer.result(20)
    asked = {key for call in store.calls for key in call}
    assert b"%d" % answered not in asked, "what is refused costs the store nothing"


def test_a_standing_queue_takes_what_is_answered_soon(timed: tuple[LookupQueue, Timed]) -> None:
    queue, store = timed
    waiting = queue.ask([b"waits"], 0)
    for _ in range(round(BURST / STEP)):
        store.clock.now += STEP
        queue.gives_up(waiting)
    assert waiting.answer.cancelled()
    soon = ceil((SHORT + STEP) / store.SECONDS)
    assert refused(queue, 5) == [number >= soon for number in range(5)]


def test_what_waits_is_asked_in_one_call(timed: tuple[LookupQueue, Timed]) -> None:
    queue, store = timed
    questions = [queue.ask([b"x"], 0)]
    taken_back = queue.ask([b"nobody"], 0)
    questions += [queue.ask([b"x", b"y", b"z"][:number], 0) for number in (2, 3)]
    taken_back.answer.cancel()
    store.go.set()
    answers = [one.answer.result(20) for one in questions]
    assert answers == [[True], [True, False], [True, False, True]]
    assert store.calls[11:] == [[b"x", b"x", b"y", b"x", b"y", b"z"]]


def test_a_call_is_bounded(
    timed: tuple[LookupQueue, Timed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LookupQueue, "TOGETHER", 3)
    queue, store = timed
    for _ in range(3):
        queue.ask([b"x", b"y"], 0)
    last = queue.ask([b"a", b"b", b"c", b"d"], 0)
    store.go.set()
    assert last.answer.result(20) == [True] * 4
    assert [len(call) for call in store.calls[11:]] == [4, 6]


def test_a_slow_store_is_asked_one_by_one(timed: tuple[LookupQueue, Timed]) -> None:
    """All of a call are answered when the last is: a long one would be too late for each."""
    queue, store = timed
    store.SECONDS = 3.0
    store.go.set()
    wait_for(lambda: not queue._calls)
    store.go.clear()
    for number in range(2):
        last = queue.ask([b"%d" % number], 0)
    store.go.set()
    assert last.answer.result(20) == [True]
    assert [len(call) for call in store.calls[11:]] == [1, 1]


def test_an_error_is_the_answer_to_all_of_a_call(timed: tuple[LookupQueue, Timed]) -> None:
    queue, store = timed
    questions = [queue.ask([b"x"], 0) for _ in range(2)]

    store.error = "broken"
    store.go.set()
    for one in questions:
        with pytest.raises(RuntimeError, match="broken"):
            one.answer.result(20)
    store.error = ""
    assert queue.ask([b"x"], 0).answer.result(20) == [True]


def test_a_queue_that_was_empty_long_enough_holds_the_next_burst(asking: Asking) -> None:
    asking.occupy()
    asking.ask(b"waits")
    asking.pass_time(2 * BURST)
    asking.answer_all()
    asking.pass_time(BURST)
    asking.store.go.clear()
    asking.occupy()
    waiting = asking.ask(b"waits")
    asking.pass_time(4 * SHORT)
    assert asking.poll(waiting, b"waits") is None


def test_an_answer_under_way_is_waited_for_in_a_standing_queue(asking: Asking) -> None:
    asking.occupy()
    asking.ask(b"waits")
    asking.pass_time(2 * BURST)
    asking.answer_all()
    asking.store.go.clear()
    begun = len(asking.store.calls)
    in_flight = asking.ask(b"begun")
    wait_for(lambda: len(asking.store.calls) == begun + 1)
    asking.clock.now += 0.9
    assert asking.poll(in_flight, b"begun") is None
    asking.store.go.set()
    wait_for(lambda: asking.poll(in_flight, b"begun") is True)


class Starved:
    """Threads that the machine does not let begin."""

    def submit(self, *_: object) -> Future[list[bool]]:
        return Future()

    def shutdown(self, **_: object) -> None:
        pass


def test_a_question_with_a_thread_to_itself_is_waited_for(asking: Asking) -> None:
    """On a busy machine a thread begins late, which is no queue."""
    asking.manager._queue.threads.shutdown()
    asking.manager._queue.threads = Starved()  # type: ignore[assignment]
    asking.manager._queue._each = 10.0
    lookup = [asking.ask(b"alone") for _ in range(THREADS)][-1]
    asking.clock.now += BURST + 4 * SHORT
    assert asking.poll(lookup, b"alone") is None
    asking.clock.now += LOOKUP_SECONDS
    assert asking.poll(lookup, b"alone") is False


def test_a_step_with_nothing_to_compute_waits_for_an_answer() -> None:
    """An engine that spins instead keeps the thread that asks from running at all."""
    store, request = Hanging(), request_of(0)
    chain = open_chain(store)
    answering = threading.Timer(0.2, store.go.set)
    try:
        chain.on_new_request(request)
        answering.start()
        steps = 0
        while chain.get_num_new_matched_tokens(request, 0)[0] is None:
            chain.build_connector_meta(IDLE_STEP)
            steps += 1
        assert steps <= 0.2 / IDLE_WAIT + 50, "one that spins takes thousands"
    finally:
        answering.cancel()
        chain.shutdown()


def test_a_step_that_computes_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[StoreManager] = []
    monkeypatch.setattr(StoreManager, "wait_a_moment", lambda manager: waits.append(manager))
    request = request_of(0)
    chain = open_chain(MemoryStore())
    try:
        chain.get_num_new_matched_tokens(request, 0)
        chain.update_state_after_alloc(request, BLOCKS, 0)
        chain.build_connector_meta(first_step(request.request_id, 0, 17))
        assert not waits
        chain.build_connector_meta(IDLE_STEP)
        assert len(waits) == 1
    finally:
        chain.shutdown()
