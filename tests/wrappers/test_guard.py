"""The guard: whatever a store does, the caller sees hits and misses; a failing one gets a rest."""

from __future__ import annotations

import logging
import math
import threading
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np
import pytest

from spec.offloading import StoreContext
from tests.support.clock import Clock
from tests.support.redis_verbs import is_up
from tests.support.servers import RedisServer
from tiers.concurrency import executors
from tiers.errors import RecordError, TierError, TierFull, TierUnavailable, TierUnusable
from tiers.remote.spec import RedisSpec
from tiers.store import (
    Block,
    Capability,
    Capable,
    Clear,
    Described,
    GatheredBlock,
    LocalIndex,
    Measured,
    PutCounts,
    RecentBlocks,
    Remembers,
    TierStore,
    Touch,
    Usage,
    Waiting,
    capability,
    each,
    time_left,
)
from tiers.testing import Memory, make_key
from tiers.wrappers.guard import Guarded, Health

KEY = make_key()


class Store:
    """Holds every key, or raises `error` when one is set; remembers which verbs were asked."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.asked: list[str] = []

    def _answer(self, verb: str, count: int) -> list[bool]:
        self.asked.append(verb)
        if self.error is not None:
            raise self.error
        return [True] * count

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return self._answer("has", len(keys))

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        return self._answer("put", len(blocks))

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        return self._answer("get", len(blocks))

    def drop(self, keys: Sequence[bytes]) -> None:
        self._answer("drop", 0)

    def close(self) -> None:
        self._answer("close", 0)


class Peeking(Store):
    def peek(self, keys: Sequence[bytes]) -> list[bool]:
        return self._answer("peek", len(keys))


class Touching(Store):
    def touch(self, keys: Sequence[bytes]) -> None:
        self._answer("touch", 0)


class Measuring(Store):
    def usage(self) -> Usage:
        self._answer("usage", 0)
        return Usage(blocks=3, used=30, capacity=300)


class Resizing(Measuring):
    capacity = 300

    def resize(self, capacity: int) -> None:
        self._answer("resize", 0)
        self.capacity = capacity


class Clearing(Store):
    def clear(self, namespace: bytes) -> bool:
        self._answer("clear", 0)
        return True


class Everything(Peeking, Touching, Measuring, Clearing):
    def describe(self) -> str:
        self._answer("describe", 0)
        return "here"

    def forget(self) -> None:
        self._answer("forget", 0)

    def counts(self) -> PutCounts:
        return PutCounts(renewed=len(self.asked))


class Damaging(Store):
    found = 0

    def damaged(self) -> int:
        return self.found


class Timer:
    """A threading.Timer that a test lets ring."""

    daemon = False

    def __init__(self, due: list[Callable[[], None]], call: Callable[[], None]) -> None:
        self.due = due
        self.call = call

    def start(self) -> None:
        self.due.append(self.call)


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


def ask_all(guarded: Guarded) -> None:
    """Ask every verb of a store that fails: each must be a miss and none may raise."""
    blocks = Memory([KEY, KEY], 8).blocks
    assert guarded.has([KEY, KEY]) == [False, False]
    assert guarded.put(blocks) == [False, False]
    assert guarded.get(blocks) == [False, False]
    guarded.drop([KEY])
    if capability(guarded, LocalIndex):
        assert guarded.peek([KEY, KEY]) == [False, False]
    if capability(guarded, Touch):
        guarded.touch([KEY])
    if capability(guarded, Clear):
        assert guarded.clear(KEY[:2]) is False, "what fails is not tried for ever"
    if capability(guarded, Measured):
        assert guarded.usage().blocks == 0
    if capability(guarded, Described):
        assert guarded.describe() == ""


def test_what_works_goes_through_unchanged() -> None:
    store = Everything()
    guarded = Guarded(store, "t")
    assert guarded.has([KEY, KEY]) == [True, True]
    assert guarded.get(Memory([KEY], 8).blocks) == [True]
    assert capability(guarded, LocalIndex) and guarded.peek([KEY]) == [True]
    assert capability(guarded, Measured) and guarded.usage() == Usage(3, 30, 300)
    assert guarded.counts() == PutCounts(renewed=len(store.asked))
    assert capability(guarded, Described) and guarded.describe() == "here"
    assert capability(guarded, Remembers) is guarded
    guarded.forget()
    assert store.asked[-1] == "forget"
    assert is_up(guarded)
    assert guarded.failures.total == 0


@pytest.mark.parametrize("verb", ["put", "usage"])
def test_a_resize_reaches_the_store_with_its_next_put_or_look(verb: str) -> None:
    store = Resizing()
    guarded = Guarded(store, "t")
    guarded.resize(100)
    assert store.asked == [], "the engine's thread calls it"
    for _ in range(2):
        guarded.usage() if verb == "usage" else guarded.put(Memory([KEY], 8).readonly())
    assert store.asked == ["resize", verb, verb] and store.capacity == 100


def test_a_resize_that_fails_is_tried_again_and_ends_no_store(clock: Clock) -> None:
    store = Resizing()
    guarded = Guarded(store, "t", clock=clock)
    store.error = OSError(5, "I/O")
    guarded.resize(100)
    guarded.usage()
    store.error = None
    assert guarded.put(Memory([KEY], 8).readonly()) == [True], "writes are not its reports"
    clock.now += 3600.0
    guarded.usage()
    assert store.capacity == 100


@pytest.mark.parametrize("store", [Store, Peeking, Touching, Measuring, Clearing, Everything])
def test_a_guarded_store_has_just_the_capabilities_of_the_store(store: type[Store]) -> None:
    plain: TierStore = store()
    guarded: TierStore = Guarded(plain, "t")
    for kind in (LocalIndex, Touch, Measured, Clear):
        assert bool(capability(guarded, kind)) == isinstance(plain, kind)


@pytest.mark.parametrize(
    "error",
    [
        *(TierUnavailable("gone"), TierUnusable("never"), OSError(5, "I/O"), ZeroDivisionError()),
        *(UnicodeDecodeError("x", b"", 0, 1, ""), CancelledError()),  # the latter by its own loop
    ],
    ids=repr,
)
def test_any_failure_is_a_miss_and_opens_the_breaker(error: BaseException, clock: Clock) -> None:
    store = Everything()
    store.error = error
    guarded = Guarded(store, "t", clock=clock)
    ask_all(guarded)
    assert store.asked == ["has", "put"]  # nothing more was asked of a tier that is down
    assert not is_up(guarded)
    assert guarded.failures.by_kind() == {type(store.error).__name__: 2}


def test_a_store_sees_how_long_its_caller_waits(clock: Clock) -> None:
    seen: list[float] = []

    class Asking(Store):
        def _answer(self, verb: str, count: int) -> list[bool]:
            seen.append(time_left())
            clock.now += 3
            seen.append(time_left())
            return [True] * count

    guarded = Guarded(Asking(), "t", deadline=10, clock=clock)
    assert guarded.has([KEY]) == [True]
    with Waiting(lambda: 105.0 - clock.now):
        assert guarded.put(Memory([KEY], 8).blocks) == [True]
    assert seen == [10, 7, 2, 0]
    assert time_left() == math.inf
    assert is_up(guarded)


class GivenUp(Store):
    """Takes a second for each call, and its caller is gone by then."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.gets = clock, 0
        self.answer: list[bool] | Exception = [False]

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        self.gets += 1
        self.clock.now += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def give_up(guarded: Guarded, clock: Clock) -> None:
    until = clock.now + 0.5
    with Waiting(lambda: until - clock.now):
        guarded.get(Memory([KEY], 8).blocks)


@pytest.mark.fault
@pytest.mark.parametrize("answer", [[False], TierUnavailable("late"), TimeoutError()])
def test_calls_that_are_given_up_show_together_that_nothing_comes(
    answer: list[bool] | Exception, clock: Clock
) -> None:
    store = GivenUp(clock)
    store.answer = answer
    guarded = Guarded(store, "t", deadline=4, clock=clock)
    for count in range(3):
        give_up(guarded, clock)
        assert is_up(guarded), f"one of {count + 1} s shows little"
    assert guarded.failures.total == 0
    guarded.has([KEY])  # it does answer
    for _ in range(4):
        assert is_up(guarded)
        give_up(guarded, clock)
    assert not guarded.health.reads_up
    # A trial is one more such call, and the next waits for twice as long.
    clock.now += 1
    give_up(guarded, clock)
    asked = store.gets
    clock.now += 1.5
    give_up(guarded, clock)
    assert store.gets == asked
    clock.now += 0.5
    give_up(guarded, clock)
    assert store.gets == asked + 1


def test_a_call_that_is_given_up_and_brought_something_is_an_answer(clock: Clock) -> None:
    store = GivenUp(clock)
    store.answer = [True]
    guarded = Guarded(store, "t", deadline=3, clock=clock)
    for _ in range(9):
        give_up(guarded, clock)
    assert is_up(guarded)


@pytest.mark.fault
@pytest.mark.parametrize("error", [TierFull("full"), RecordError("bad")])
def test_a_full_tier_or_a_bad_record_is_a_miss_and_no_more(error: Exception) -> None:
    store = Everything()
    store.error = error
    guarded = Guarded(store, "t")
    ask_all(guarded)
    assert len(store.asked) == 9
    assert is_up(guarded)
    assert guarded.failures.by_kind() == {type(error).__name__: 9}


def test_a_panic_of_a_plugin_in_rust_is_a_failure() -> None:
    """PyO3 raises it as what is no Exception."""
    store = Store()
    store.error = type("PanicException", (BaseException,), {})("explicit panic")
    guarded = Guarded(store, "t")
    assert guarded.has([KEY]) == [False] and not is_up(guarded)


class Incapable(Store, Capable):
    def capability(self, kind: type[Capability]) -> Capability | None:
        assert self.error is not None
        raise self.error


class Nameless(type):
    def __getattribute__(cls, name: str) -> object:
        if name in ("__name__", "__qualname__", "__module__"):
            raise RuntimeError("no name")
        return super().__getattribute__(name)


class Lying(Exception):
    """It answers what it is asked by what it was made with."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        if isinstance(self.args[0], Exception):
            raise self.args[0]
        return cast(type, self.args[0])


class Mute(Exception):
    def __getattribute__(self, name: str) -> object:
        raise RuntimeError(name)


class Named(Exception, metaclass=Nameless): ...


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("Named", None),
        ("Mute", None),
        ("Lying", KeyboardInterrupt),
        ("Lying", RecordError),
        ("Lying", RuntimeError()),
    ],
)
@pytest.mark.parametrize("store", [Store, Incapable])
def test_no_error_escapes_by_what_its_class_says(
    kind: str, says: object, store: type[Store]
) -> None:
    made = store()
    made.error = globals()[kind](says)
    guarded = Guarded(made, "t")
    answers: list[object] = []
    with suppress(BaseException):  # which no runner of tests could show
        answers += [guarded.has([KEY]), capability(guarded, Clear)]
    assert answers == [[False], None] and not is_up(guarded)
    assert guarded.failures.by_kind() == {kind: 1 + (store is Incapable)}


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit(1)])
def test_a_request_to_stop_is_no_failure(stop: BaseException) -> None:
    store = Store()
    store.error = stop
    with pytest.raises(type(stop)):
        Guarded(store, "t").has([KEY])


@pytest.mark.fault
def test_a_store_that_answers_too_little_is_a_miss() -> None:
    class Short(Peeking):
        def _answer(self, verb: str, count: int) -> list[bool]:
            return [True]

    for verb in ("has", "peek"):
        guarded = Guarded(Short(), "t")
        assert getattr(guarded, verb)([KEY, KEY]) == [False, False]
        assert guarded.failures.by_kind() == {"TierError": 1}


def test_trials_get_rarer_until_one_succeeds(clock: Clock) -> None:
    store = Store()
    store.error = TierUnavailable("gone")
    guarded = Guarded(store, "t", clock=clock)
    guarded.has([KEY])
    for wait in (1, 2, 4, 8, 16, 30, 30):
        asked = len(store.asked)
        clock.now += wait - 0.01
        guarded.has([KEY])
        assert len(store.asked) == asked
        clock.now += 0.01
        guarded.has([KEY])
        guarded.has([KEY])  # one trial at a time
        assert len(store.asked) == asked + 1
    store.error = None
    clock.now += 30
    assert guarded.has([KEY]) == [True]
    assert is_up(guarded)
    store.error = TierUnavailable("gone again")
    guarded.has([KEY])
    store.error = None
    clock.now += 1  # the wait begins at its first length again
    assert guarded.has([KEY]) == [True]


def test_a_look_is_no_trial_and_never_ends_the_rest(clock: Clock) -> None:
    store = Everything()
    guarded = Guarded(store, "t", clock=clock)
    assert capability(guarded, LocalIndex)
    store.error = TierUnavailable("gone")
    guarded.has([KEY])
    store.error = None
    assert guarded.peek([KEY]) == [False]
    clock.now += 1
    assert guarded.peek([KEY]) == [True]  # so that a load may try the tier
    assert not is_up(guarded)
    assert guarded.get(Memory([KEY], 8).blocks) == [True]
    assert is_up(guarded)


def test_a_call_from_before_the_failure_decides_nothing(clock: Clock) -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Slow(Store):
        def get(self, blocks: Sequence[Block]) -> list[bool]:
            entered.set()
            assert go_on.wait(20)
            return [True] * len(blocks)

    store = Slow()
    guarded = Guarded(store, "t", clock=clock)
    hits: list[bool] = []
    thread = threading.Thread(target=lambda: hits.extend(guarded.get(Memory([KEY], 8).blocks)))
    thread.start()
    assert entered.wait(20)
    store.error = TierUnavailable("gone")
    guarded.has([KEY])
    go_on.set()
    thread.join()
    assert hits == [True]
    assert not is_up(guarded)


@pytest.mark.fault
def test_a_tier_that_takes_nothing_still_gives(clock: Clock) -> None:
    class ReadOnly(Store):
        def put(self, blocks: Sequence[Block]) -> list[bool]:
            raise TierUnavailable("read-only file system")

    guarded = Guarded(ReadOnly(), "t", clock=clock)
    blocks = Memory([KEY], 8).blocks
    assert guarded.put(blocks) == [False]
    assert guarded.get(blocks) == [True]
    assert guarded.has([KEY]) == [True]
    assert guarded.health._replace(why="") == Health(True, False, reads_up=True, writes_up=False)


class Hanging(Everything):
    """Its verbs return when they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        self.asked.append("get")
        assert self.let_go.wait(20)
        return [True] * len(blocks)


def start_get(guarded: Guarded) -> threading.Thread:
    thread = threading.Thread(target=lambda: guarded.get(Memory([KEY], 8).blocks))
    thread.start()
    return thread


@pytest.mark.fault
def test_what_hangs_takes_one_thread_and_is_left_alone(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    store = Hanging()
    guarded = Guarded(store, "t", deadline=5, clock=clock)
    assert capability(guarded, LocalIndex)
    hung = start_get(guarded)
    while not store.asked:
        pass
    clock.now += 4.9
    assert is_up(guarded)
    clock.now += 0.2
    assert not is_up(guarded)
    assert guarded.peek([KEY]) == [False]  # the engine's own thread does not ask for it either
    clock.now += 1000
    assert guarded.get(Memory([KEY], 8).blocks) == [False]  # no trial while the first one hangs
    assert guarded.failures.by_kind() == {"Late": 1}
    store.let_go.set()
    hung.join()
    assert not is_up(guarded)  # an answer that comes so late proves nothing
    assert guarded.get(Memory([KEY], 8).blocks) == [True]
    assert is_up(guarded)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "reads are down (no answer within its deadline, 5 s)" in said[0]


def test_the_next_call_finds_that_one_hangs(clock: Clock) -> None:
    """Whoever asks for no health in between: else each look-up would hang as well."""
    store = Hanging()
    guarded = Guarded(store, "t", deadline=5, clock=clock)
    hung = start_get(guarded)
    while not store.asked:
        pass
    clock.now += 5.1
    assert guarded.has([KEY]) == [False] and store.asked == ["get"]
    store.let_go.set()
    hung.join()


def test_a_trial_that_hangs_is_a_trial_that_failed(clock: Clock) -> None:
    store = Hanging()
    guarded = Guarded(store, "t", deadline=5, clock=clock)
    store.error = TierUnavailable("gone")
    guarded.has([KEY])
    store.error = None
    clock.now += 1
    hung = start_get(guarded)
    while "get" not in store.asked:
        pass
    assert guarded.has([KEY]) == [False]  # one trial at a time
    clock.now += 5.1
    assert not guarded.health.reads
    store.let_go.set()
    hung.join()
    clock.now += 1.9
    assert guarded.has([KEY]) == [False]  # the wait has doubled
    clock.now += 0.2
    assert guarded.has([KEY]) == [True]
    assert is_up(guarded)


def test_each_change_of_state_is_logged_once(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    store = Store()
    guarded = Guarded(store, "nearby", clock=clock)
    for _ in range(2):
        store.error = TierUnavailable("no route")
        for _ in range(5):
            guarded.has([KEY])
            clock.now += 10
        store.error = None
        clock.now += 30
        guarded.has([KEY])
        guarded.has([KEY])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 4
    assert "nearby: reads are down" in said[0] and "no route" in said[0]
    assert "nearby: reads are up again" in said[1]
    assert [one.levelno for one in caplog.records[:2]] == [logging.WARNING, logging.INFO]


def test_a_cause_that_comes_while_the_tier_is_down_is_named_once(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that was killed and came back with another password is down for its password."""
    caplog.set_level(logging.INFO)
    store = Store()
    guarded = Guarded(store, "nearby", clock=clock)
    seen = []
    for why in ("no route", "no route", "wrong password", "no route", "wrong password"):
        store.error = TierUnavailable(why)
        guarded.has([KEY])
        seen.append(guarded.health.why)
        clock.now += 30
    assert [why.rpartition(": ")[2] for why in seen] == [
        "no route",
        "no route",
        "wrong password",
        "no route",
        "wrong password",
    ]
    store.error = None
    guarded.has([KEY])
    store.error = TierUnavailable("wrong password")
    guarded.has([KEY])
    assert caplog.messages == [
        "tier nearby: reads are down (TierUnavailable: no route); tried again every 1 s or more",
        "tier nearby: reads are down (TierUnavailable: wrong password); "
        "tried again every 4 s or more",
        "tier nearby: reads are up again",
        "tier nearby: reads are down (TierUnavailable: wrong password); "
        "tried again every 1 s or more",
    ]


def test_a_tier_that_flaps_and_damages_is_said_and_then_summed_up(
    clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    minutes: list[Callable[[], None]] = []
    monkeypatch.setattr(threading, "Timer", lambda seconds, call: Timer(minutes, call))
    store = Damaging()
    guarded = Guarded(store, "nearby", clock=clock)
    for _ in range(3):
        store.error = TierUnavailable("no route")
        guarded.has([KEY])
        store.error = None
        clock.now += 1
        guarded.has([KEY])
    for found in (2, 2, 5):
        store.found = found
        guarded.get(Memory([KEY], 8).blocks)
    assert [line.split(" (")[0] for line in caplog.messages] == [
        "tier nearby: reads are down",
        "tier nearby: reads are up again",
        "tier nearby: reads are down",
        "tier nearby: reads are up again",
        "tier nearby: 2 block(s) were damaged, each a miss; see kvtiers verify, scrub",
    ]
    caplog.clear()
    for sum_up in minutes[:]:
        sum_up()
    assert caplog.messages == [
        "tier nearby: 2 more times reads went down or up in the last minute; they are up now",
        "tier nearby: 3 more blocks were damaged in the last minute",
    ]


def test_the_count_of_damage_never_falls() -> None:
    """vLLM counts it in a counter of Prometheus, which raises where it is told of less, and that
    ended the engine's output."""
    asked, answer = threading.Event(), threading.Event()

    class Slow(Damaging):
        def damaged(self) -> int:
            found = self.found
            if threading.current_thread() is not threading.main_thread():
                asked.set()
                assert answer.wait(10)
            return found

    store = Slow()
    store.found = 5
    guarded = Guarded(store, "t")
    slow = threading.Thread(target=guarded.get, args=(Memory([KEY], 8).blocks,))
    slow.start()
    assert asked.wait(10)
    store.found = 6
    guarded.get(Memory([KEY], 8).blocks)
    answer.set()
    slow.join()
    assert guarded.damaged() == 6
    store.found = 0  # it has begun anew
    assert guarded.get(Memory([KEY], 8).blocks) == [True]
    assert guarded.damaged() == 6


@pytest.mark.parametrize("found", [-3, 2**63, 10**400, "3", True, None])
def test_what_is_no_count_of_damage_is_a_miss(clock: Clock, found: Any) -> None:
    store = Damaging()
    store.found = found
    guarded = Guarded(store, "t", clock=clock)
    assert guarded.get(Memory([KEY], 8).blocks) == [False]
    assert (guarded.damaged(), guarded.failures.by_kind()) == (0, {"TierError": 1})


ROWS = [[KEY, KEY], []]
ODD = (-3, 2**63, 10**400, "3", "", True, 1.5)
LIES: dict[str, tuple[tuple[Any, ...], Any, Any, Sequence[Any]]] = {
    "pack_blocks": ((), 3, 0, [None, 0, *ODD]),
    "held_prefix": ((ROWS,), [2, 0], [0, 0], [None, [2], (2, 0), [3, 0], [-1, 0], [True, 0]]),
    "held_blocks": (
        *((ROWS,), [[True, False], []], [[False, False], []]),
        [None, [[True] * 2], [[True], []], [[True, 1], []], [[True] * 2, [], []], [True, False]],
    ),
    "recent": ((KEY, 9), RecentBlocks([KEY], 1), RecentBlocks(), [None, [KEY], ([KEY], None)]),
    "usage": (
        *((), Usage(3, 30, None), Usage(0, 0, None)),
        [None, (3, 30, 300)]
        + [Usage(*odd) for n in (None, *ODD) for odd in ((n, 30, 300), (3, n, 300))]
        + [Usage(3, 30, n) for n in ODD],  # type: ignore[arg-type]
    ),
}
"""Of each verb its arguments, a right answer, that of a tier that is left alone, and no answers."""


@pytest.mark.parametrize(
    ("verb", "odd"), [(verb, odd) for verb, (*_, odds) in LIES.items() for odd in odds]
)
def test_what_is_no_answer_is_a_miss(clock: Clock, verb: str, odd: Any) -> None:
    args, right, miss, _ = LIES[verb]
    answers = [odd, right]
    verbs = dict.fromkeys(("pack_blocks", "held_prefix", verb), lambda *args: answers.pop())
    store = type("Lying", (Store,), verbs)()
    guarded = Guarded(store, "t", clock=clock)
    assert getattr(guarded, verb)(*args) == right
    assert getattr(guarded, verb)(*args) == miss
    assert guarded.failures.by_kind() == {"TierError": 1}


@pytest.mark.parametrize("odd", [None, (1, 2), *(PutCounts(1, n) for n in ODD)])  # type: ignore[arg-type]
def test_what_is_no_count_of_puts_is_a_miss(clock: Clock, odd: Any) -> None:
    store = type("Lying", (Store,), {"counts": lambda self: odd})()
    guarded = Guarded(store, "t", clock=clock)
    assert guarded.put(Memory([KEY], 8).blocks) == [False]
    assert (guarded.counts(), guarded.failures.by_kind()) == (PutCounts(), {"TierError": 1})


def test_a_boolean_of_numpy_is_named_apart() -> None:
    with pytest.raises(TierError, match=r"has answered a numpy\.bool_? where a boolean belongs"):
        each("has", [True, np.bool_(True)], 2)


class Untold(Exception):
    """An error that fails even when it is told of."""

    def __str__(self) -> str:
        raise self.args[0] if self.args else RuntimeError("no text either")


@pytest.mark.parametrize(
    ("error", "told"), [(RuntimeError("no"), "RuntimeError: no"), (Untold(), "Untold")]
)
def test_a_store_that_cannot_tell_what_it_can_is_named_once(
    caplog: pytest.LogCaptureFixture, error: Exception, told: str
) -> None:
    store = Incapable()
    store.error = error
    guarded = Guarded(store, "far (package acme)")
    for _ in range(3):
        assert [capability(guarded, kind) for kind in (Clear, Touch)] == [None, None]
    assert guarded.failures.total == 6
    assert caplog.messages == [
        "tier far (package acme): the question whether it has Clear failed, and it is used "
        f"without ({told})"
    ]
    assert isinstance(caplog.records[0].exc_info, tuple)


@pytest.mark.parametrize("end", [RuntimeError(), SystemExit(1), KeyboardInterrupt()])
def test_an_error_that_fails_when_it_is_told_of_is_a_miss(
    clock: Clock, caplog: pytest.LogCaptureFixture, end: BaseException
) -> None:
    store = Store()
    store.error = Untold(end)
    ask_all(Guarded(store, "t", clock=clock))
    assert "tier t: reads are down (Untold); tried again every 1 s or more" in caplog.messages


def test_of_an_error_that_quotes_a_block_the_beginning_is_told(clock: Clock) -> None:
    store = Store()
    store.error = TierUnavailable("bad: " + "00" * (2 << 20))
    guarded = Guarded(store, "t", clock=clock)
    ask_all(guarded)
    assert "TierUnavailable: bad: 0000" in guarded.health.why
    assert len(guarded.health.why) < 1100


class OneList(Everything):
    """Answers with one list, which it changes for the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Any] = []

    def _answer(self, verb: str, count: int) -> list[bool]:
        self.answers[:] = [True] * count
        return self.answers

    def pack_blocks(self) -> int:
        return 1

    def held_prefix(self, prompts: Sequence[Sequence[bytes]]) -> list[int]:
        self.answers[:] = [1] * len(prompts)
        return self.answers


def test_answers_stay_as_they_were_given(clock: Clock) -> None:
    guarded = Guarded(OneList(), "t", clock=clock)
    first = [guarded.has([KEY]), guarded.peek([KEY]), guarded.held_prefix([[KEY]])]
    guarded.has([KEY] * 3)
    assert first == [[True], [True], [1]]


def test_close_reaches_a_store_that_is_down_and_only_once() -> None:
    store = Store()
    store.error = OSError("bad")
    guarded = Guarded(store, "t")
    guarded.has([KEY])
    guarded.close()
    guarded.close()
    assert store.asked == ["has", "close"]


@pytest.mark.parametrize("verb", ["has", "put"])
def test_a_verb_that_its_closing_ends_is_no_news(
    caplog: pytest.LogCaptureFixture, verb: str
) -> None:
    """An engine that ended told of a tier that is down, with a traceback."""
    asked = threading.Event()

    class Ended(Store):
        def _answer(self, verb: str, count: int) -> list[bool]:
            if verb == "close":
                self.error = AttributeError("no connection")
                return []
            asked.set()
            while self.error is None:
                pass
            raise self.error

    guarded = Guarded(Ended(), "t")
    asking = {"has": lambda: guarded.has([KEY]), "put": lambda: guarded.put([])}
    in_flight = threading.Thread(target=asking[verb])
    in_flight.start()
    assert asked.wait(10)
    guarded.close()
    in_flight.join()
    assert guarded.failures.by_kind() == {"AttributeError": 1}
    assert caplog.messages == []


def test_what_an_ending_process_refuses_is_no_news(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A load that was given to threads as the process ended told of a defect, with a traceback."""
    ending, store = threading.Event(), Store()
    monkeypatch.setattr(executors, "_ending", ending)
    store.error = RuntimeError("the executor has been shut down")
    guarded = Guarded(store, "t")
    ending.set()
    assert guarded.has([KEY]) == [False]
    assert guarded.failures.by_kind() == {"RuntimeError": 1}
    assert caplog.messages == []


def test_a_store_that_fails_to_close_is_told(caplog: pytest.LogCaptureFixture) -> None:
    store = Store()
    store.error = OSError("bad")
    Guarded(store, "t").close()
    assert caplog.messages == [
        "tier t: writes are down (OSError: bad); tried again every 1 s or more"
    ]


@pytest.mark.parametrize("error", [None, OSError("bad")])
def test_close_reaches_a_store_when_no_thread_can_be_had(
    error: OSError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python 3.12 on none can while the interpreter ends, when an engine may close us."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    store = Store()
    store.error = error
    guarded = Guarded(store, "t")
    monkeypatch.setattr(threading.Thread, "start", start)
    guarded.close()
    guarded.close()
    assert store.asked == ["close"]


def test_failures_of_many_threads_are_all_counted(clock: Clock) -> None:
    store = Store()
    store.error = TierFull("full")
    guarded = Guarded(store, "t", clock=clock)

    def ask() -> None:
        for _ in range(500):
            guarded.has([KEY])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert guarded.failures.by_kind() == {"TierFull": 4000}


@pytest.fixture
def guarded_redis(server: RedisServer, clock: Clock) -> Iterator[Guarded]:
    spec = RedisSpec.model_validate({"url": server.url, "timeout": "2s"})
    guarded = Guarded(spec.open(StoreContext(payload_bytes=4096)), "redis", clock=clock)
    yield guarded
    guarded.close()


@pytest.mark.parametrize("fault", ["kill", "hang"])
def test_a_real_server_goes_and_comes_back(
    server: RedisServer, guarded_redis: Guarded, clock: Clock, fault: str
) -> None:
    memory = Memory([make_key(), make_key()], 4096).fill()
    assert guarded_redis.put(memory.blocks) == [True, True]
    getattr(server, fault)()
    for _ in range(200):  # one of these waits for the server, not two hundred
        assert guarded_redis.get(memory.blocks) == [False, False]
    assert not is_up(guarded_redis)
    assert guarded_redis.failures.total == 1
    assert guarded_redis.put(memory.blocks) == [False, False]
    assert guarded_redis.health.why.startswith("reads are down: TierUnavailable: redis://")
    assert guarded_redis.health[:4] == (False, False, False, False)
    server.start() if fault == "kill" else server.resume()
    assert guarded_redis.put(memory.fill().blocks) == [False, False]
    clock.now += 1
    assert guarded_redis.health[:4] == (True, True, False, False)
    assert guarded_redis.put(memory.blocks) == [True, True]
    assert guarded_redis.get(memory.blocks) == [True, True]
    assert memory.holds(0) and memory.holds(1)
    assert is_up(guarded_redis)


@pytest.mark.fault
def test_a_put_can_t_change_what_it_is_given() -> None:
    class Scribbles(Store):
        def put(self, blocks: Sequence[Block]) -> list[bool]:
            for block in blocks:
                assert block.checksum == b"known"
                block.payload[0] ^= 1
            return super().put(blocks)

    guarded, memory = Guarded(Scribbles(), "plugin"), Memory([KEY], 4096).fill()
    assert guarded.put([GatheredBlock(*memory.blocks[0], b"known")]) == [False]
    assert memory.holds(0)
    assert guarded.failures.by_kind() == {"TypeError": 1}
