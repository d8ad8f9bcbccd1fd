"""A store that is opened late is, from then on, as one that was opened at once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spec.errors import describe_error
from spec.offloading import EncryptionSpec, StoreContext, StoreSpec
from spec.registry import tier_class
from tests.support.lookups import look_up
from tests.support.plugin_packages import Install
from tiers.block import NAMESPACE_BYTES
from tiers.connector.scheduler.lookups import Lookup
from tiers.connector.scheduler.store_manager import StoreManager
from tiers.contract.generation import Generation, space_of
from tiers.disk.spec import DiskSpec
from tiers.errors import TierNotOpen, TierUnavailable, TierUnusable
from tiers.store import (
    Capable,
    Clear,
    Damages,
    LocalIndex,
    Measured,
    PutCounts,
    Resizable,
    TierStore,
    Touch,
    capability,
)
from tiers.testing import Memory, make_key
from tiers.wrappers import guard as guarding
from tiers.wrappers import opening, reopening
from tiers.wrappers.guard import FAILED, HEALTHY, Guarded
from tiers.wrappers.opening import open_guarded
from tiers.wrappers.reopening import Reopening

SIZE = 4096 * 4
SPACE = b"n" * NAMESPACE_BYTES
SITE = StoreContext(SIZE)


@pytest.fixture(autouse=True)
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reopening, "RETRY_AFTER", 0.1)


def until(done: Callable[[], object]) -> None:
    """Ask until it is so; the test's own timeout ends it."""
    while not done():
        time.sleep(0.02)


def keys(count: int) -> list[bytes]:
    return [make_key(start=SPACE) for _ in range(count)]


def put(store: TierStore, some: list[bytes]) -> None:
    assert store.put(Memory(some, SIZE).fill().blocks) == [True] * len(some)


def mounted_late(folder: Path, blocks: int = 40) -> Guarded:
    """A disk tier whose mount comes after it was opened; open by now."""
    place = folder / "mount"
    place.write_text("not mounted yet")
    spec = DiskSpec(path=place / "tier", capacity=blocks * 2 * SIZE)
    store = open_guarded(spec, SITE)
    assert capability(store, LocalIndex) is None
    place.unlink()
    until(lambda: store.health == HEALTHY)
    return store


@pytest.fixture
def late(tmp_path: Path) -> Iterator[Guarded]:
    store = mounted_late(tmp_path)
    yield store
    store.close()


def test_a_disk_mounted_late_has_every_capability(late: Guarded) -> None:
    for kind in (LocalIndex, Touch, Clear, Damages, Measured, Resizable):
        assert capability(late, kind) is late, kind
    put(late, some := keys(3))
    assert late.usage().blocks == 3
    assert late.peek([*some, make_key()]) == [True] * 3 + [False]


@pytest.mark.fault
def test_a_disk_mounted_late_is_looked_up_touched_and_cleared(tmp_path: Path) -> None:
    late = mounted_late(tmp_path, blocks=10)
    generation = Generation(is_own=True)
    manager = StoreManager(late, [SPACE], generation)
    names = [generation.key(key[NAMESPACE_BYTES:]) for key in keys(2)]
    some = [space_of(SPACE, generation.tag) + name for name in names]
    put(late, some)
    assert look_up(manager, names, Lookup()) == 2, "at once, from memory"
    for _ in range(30):
        assert manager.touch_and_list_missing(names) == [False, False]  # which counts them as used
        put(late, keys(1))
    assert late.has(some) == [True, True], "what is used outlives what is not"
    manager.reset()
    manager.clear(generation.renew())
    until(lambda: late.has(some) == [False, False])
    manager.close()


def test_a_disk_mounted_late_has_the_capacity_that_was_set_before(tmp_path: Path) -> None:
    place = tmp_path / "mount"
    place.write_text("not mounted yet")
    late = open_guarded(DiskSpec(path=place / "tier", capacity=40 * 2 * SIZE), SITE)
    late.resize(20 * 2 * SIZE)
    assert late.usage().capacity is None
    place.unlink()
    until(lambda: late.health == HEALTHY)
    assert late.usage().capacity == 20 * 2 * SIZE
    late.close()


def test_a_disk_mounted_late_counts_damage(late: Guarded, tmp_path: Path) -> None:
    put(late, some := keys(1))
    for slab in (tmp_path / "mount" / "tier").glob("slab-*"):
        with slab.open("r+b") as file:
            file.seek(SIZE // 2)
            file.write(b"\xff\xee\xdd")
    assert late.get(Memory(some, SIZE).blocks) == [False]
    assert late.damaged() == 1


class Store:
    """A plugin's store, that keeps nothing."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def has(self, keys: object) -> list[bool]:
        return [False] * len(keys)  # type: ignore[arg-type]

    put = get = has

    def drop(self, keys: object) -> None:
        pass

    def close(self) -> None:
        self.closed.set()


class PluginSpec(StoreSpec):
    """Opens as the test says."""

    def open(self, site: StoreContext) -> TierStore:
        return OPEN[0]()


OPEN: list[Callable[[], TierStore]] = []


class Mounted(Store):
    """A store that is there until it is `gone`, and counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.gone = False
        self.asked = 0
        self.finds: Callable[[], object] = bool
        """What a `put` or `get` does before it looks whether the store is gone."""

    def has(self, keys: object) -> list[bool]:
        self.asked += 1
        if self.gone:
            raise TierNotOpen("unmounted")
        return [True] * len(keys)  # type: ignore[arg-type]

    def get(self, blocks: object) -> list[bool]:
        self.finds()
        return [not held for held in self.has(blocks)]

    def put(self, blocks: object) -> list[bool]:
        self.finds()
        return self.has(blocks)

    def damaged(self) -> int:
        return self.asked

    def counts(self) -> PutCounts:
        return PutCounts(self.asked, 2 * self.asked)


def opened(how: Callable[[], TierStore]) -> Guarded:
    OPEN[:] = [how]
    return open_guarded(PluginSpec.model_validate({"type": "plugin", "deadline": "200ms"}), SITE)


def raising(error: BaseException) -> Callable[[], TierStore]:
    def how() -> TierStore:
        raise error

    return how


@pytest.mark.fault
@pytest.mark.parametrize("error", [KeyError("host"), ZeroDivisionError(), SystemExit(3)])
def test_an_open_that_raises_is_that_tier_s_failure(error: BaseException) -> None:
    with pytest.raises(TierUnusable, match=f"open .*{type(error).__name__}"):
        opened(raising(error))


class Untold(TierNotOpen):
    def __str__(self) -> str:
        raise SystemExit(3)


class UntoldForGood(TierUnusable):
    def __str__(self) -> str:
        raise SystemExit(3)


def test_an_open_whose_error_can_not_be_told_is_that_tier_s_failure(
    soon_again: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with pytest.raises(TierUnusable, match="UntoldForGood"):
        opened(raising(UntoldForGood()))
    first = Mounted()
    first.finds = raising(Untold())
    opens: Iterator[Callable[[], TierStore]] = iter([raising(Untold()), lambda: first])
    store = opened(lambda: next(opens, Mounted)())
    until(lambda: store.health.reads)
    assert [line for line in caplog.messages if "tried again: Untold" in line]
    assert store.put(Memory([make_key()], SIZE).fill().blocks) == [False], "it is lost by this"
    assert [line for line in caplog.messages if "is opened anew: Untold" in line]
    until(lambda: store.health.reads)
    store.close()


@pytest.mark.parametrize("error", [ValueError("not in list"), SystemExit(3)])
def test_an_open_that_can_not_be_announced_is_one(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the store would be closed, or another be opened beside it again and again."""

    def announce(store: TierStore) -> None:
        raise error

    OPEN[:] = [Store]
    spec = PluginSpec.model_validate({"type": "plugin"})
    store = open_guarded(spec, SITE, announce=announce)
    assert store.health == HEALTHY
    assert store.now() is not None
    store.close()
    assert type(error).__name__ in caplog.text


def test_an_open_that_gives_no_store_is_that_tier_s_failure() -> None:
    with pytest.raises(TierUnusable, match="returned a NoneType, which has no has, put"):
        opened(lambda: None)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    "error", [TierNotOpen("locked"), TierUnavailable("refused"), OSError(5, "I/O")]
)
def test_what_may_pass_is_tried_again_while_nobody_asks(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    store = opened(raising(error))
    assert "plugin (package tests) is unusable for now" in caplog.text
    assert store.has([make_key()]) == [False]
    assert store.health == FAILED._replace(why=describe_error(error))
    OPEN[:] = [Store]
    until(lambda: store.health == HEALTHY)
    store.close()


@pytest.mark.fault
def test_an_open_that_hangs_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(opening, "OPEN_SECONDS", 0.0)
    go_on, made = threading.Event(), Store()

    def how() -> TierStore:
        go_on.wait()
        return made

    store = opened(how)
    assert "open has not returned after 0.2 s" in caplog.text
    assert store.put(Memory([make_key()], SIZE).blocks) == [False]
    assert store.health == FAILED._replace(opening=True)
    go_on.set()
    until(lambda: store.health == HEALTHY)
    store.close()
    assert made.closed.is_set()


def test_an_engine_that_serves_waits_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "OPEN_SECONDS", 3600.0)
    monkeypatch.setattr(opening, "STEP_SECONDS", 0.1)
    go_on = threading.Event()

    def how() -> TierStore:
        go_on.wait()
        return Store()

    OPEN[:] = [how]
    store = open_guarded(PluginSpec(type="plugin"), SITE, in_step=True)
    assert capability(store, LocalIndex) is None
    go_on.set()
    store.close()


def test_a_store_that_opens_after_its_tier_was_closed_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opening, "OPEN_SECONDS", 0.0)
    go_on, made = threading.Event(), Store()

    def how() -> TierStore:
        go_on.wait()
        return made

    store = opened(how)
    store.close()
    go_on.set()
    assert made.closed.wait(60)


def test_a_retry_that_hangs_is_no_first_opening() -> None:
    """Else the state would change with each retry of a tier that is down."""
    store = opened(raising(TierUnavailable("refused")))
    assert not store.health.opening
    began, go_on = threading.Event(), threading.Event()

    def how() -> TierStore:
        began.set()
        go_on.wait()
        return Store()

    OPEN[:] = [how]
    assert began.wait(60) and not store.health.opening
    go_on.set()
    store.close()


def reopened(store: Guarded) -> None:
    until(lambda: store.has([make_key()]) == [True])


def test_counts_go_on_where_a_store_is_opened_anew() -> None:
    first = Mounted()
    store, blocks = opened(lambda: first), Memory([make_key()], SIZE).blocks
    for _ in range(3):
        store.put(blocks), store.get(blocks)
    assert (store.counts(), store.damaged()) == (PutCounts(5, 10), 6)
    first.gone, second = True, Mounted()
    OPEN[:] = [lambda: second]
    assert store.get(blocks) == [False]
    reopened(store)
    until(lambda: store.put(blocks) == [True])
    assert store.counts() == PutCounts(5 + second.asked, 10 + 2 * second.asked)
    store.get(blocks)
    assert store.damaged() == 6 + second.asked
    store.close()


def test_a_store_that_fails_is_not_opened_anew() -> None:
    class Failing(Mounted):
        def get(self, blocks: object) -> list[bool]:
            raise TierUnavailable("no answer")

    first = Failing()
    store, blocks = opened(lambda: first), Memory([make_key()], SIZE).blocks
    assert store.get(blocks) == [False] and store.put(blocks) == [True]
    health = store.health
    assert (health.reads_up, health.writes_up, health.opening) == (False, True, False)
    assert not first.closed.is_set()
    store.close()


def test_a_store_that_is_opened_anew_is_not_peeked_before_its_index_is_made() -> None:
    class Indexed(Mounted, Capable):
        has_index = True

        def capability(self, kind: type[Any]) -> Any:
            return None if kind is LocalIndex and not self.has_index else super().capability(kind)

        peek = Mounted.has

    first, second = Indexed(), Indexed()
    store, second.has_index = opened(lambda: first), False
    assert store.peek([make_key()]) == [True]
    first.gone = True
    OPEN[:] = [lambda: second]
    assert store.peek([make_key()]) == [False]
    reopened(store)
    assert store.peek([make_key()]) == [False] and store.health == HEALTHY
    second.has_index = True
    assert store.peek([make_key()]) == [True]
    store.close()


@pytest.mark.fault
def test_a_store_that_is_opened_anew_while_keys_rotate_puts_under_the_one_of_before(
    tmp_path: Path,
) -> None:
    """Under the new key what a worker puts would be found by no other process of its engine."""
    file, old, new = tmp_path / "keys", "ab" * 32, "cd" * 32
    file.write_text(old)
    encryption = EncryptionSpec(key_file=file)
    spec = DiskSpec(path=tmp_path / "kv", capacity=40 * 2 * SIZE, encryption=encryption)
    scheduler, worker = open_guarded(spec, SITE), open_guarded(spec, SITE)

    def lose() -> None:
        assert isinstance(worker._source, Reopening)
        assert worker._source.lost(worker.now(), TierNotOpen("the disk is gone"))

    file.write_text(f"{new}\n{old}")
    restarted = open_guarded(spec, SITE)
    put(restarted, theirs := keys(1))
    lose()
    until(lambda: worker.health == HEALTHY)
    put(worker, ours := keys(3))
    assert scheduler.has(ours) == [True] * 3
    assert worker.has([*ours, *theirs]) == [True] * 4
    file.write_text(new)
    lose()
    until(lambda: "has not the key that this engine began with" in worker.health.why)
    for store in (restarted, scheduler, worker):
        store.close()


@pytest.mark.parametrize("verb", ["put", "get"])
@pytest.mark.parametrize("ends_well", [False, True])
def test_a_verb_that_was_under_way_in_a_lost_store_costs_its_successor_nothing(
    caplog: pytest.LogCaptureFixture, verb: str, ends_well: bool
) -> None:
    caplog.set_level(logging.INFO)
    first, second = Mounted(), Mounted()
    began, go_on = threading.Event(), threading.Event()

    def finds() -> None:
        began.set()
        go_on.wait()

    first.finds = finds
    store = opened(lambda: first)
    blocks = Memory([make_key()], SIZE).blocks
    under_way = threading.Thread(target=getattr(store, verb), args=[blocks])
    under_way.start()
    began.wait()
    first.gone = True
    OPEN[:] = [lambda: second]
    store.has([make_key()])
    reopened(store)
    assert first.closed.wait(60)
    first.gone, first.asked = not ends_well, 1000
    go_on.set()
    under_way.join()
    assert store.counts().renewed < 1000 > store.damaged(), "its own are counted when it is lost"
    assert not second.closed.is_set() and store.has([make_key()]) == [True]
    assert caplog.text.count("is open no more") == 1
    store.close()


@pytest.mark.parametrize("error", [TierUnusable("mode 0777"), TierUnavailable("no answer")])
def test_what_keeps_a_lost_store_from_being_opened_anew_is_told_once(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = Mounted()
    store = opened(lambda: first)
    first.gone = True
    tries = []

    def how() -> TierStore:
        tries.append(error)
        raise error

    OPEN[:] = [how]
    assert store.has([make_key()]) == [False]
    until(lambda: len(tries) > 1)
    assert caplog.text.count("is open no more, and is opened anew: unmounted") == 1
    assert caplog.text.count(str(error)) == 1
    OPEN[:] = [Mounted]
    reopened(store)
    store.close()


@pytest.mark.fault
def test_a_close_that_hangs_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guarding, "CLOSE_SECONDS", 0.1)
    go_on = threading.Event()

    class Hanging(Store):
        def close(self) -> None:
            go_on.wait()

    store = opened(Hanging)
    with caplog.at_level(logging.WARNING):
        store.close()
    assert "plugin (package tests): not closed after 0.1 s" in caplog.text
    go_on.set()


def test_a_process_that_has_no_thread_left_finds_the_tier_unusable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fails)
    with pytest.raises(TierUnusable, match="can't start new thread"):
        open_guarded(DiskSpec(path=tmp_path, capacity=1 << 20), SITE)


ODD = """
from spec.offloading import StoreSpec

class NoneSpec(StoreSpec):
    def open(self, site): pass

class ExitsSpec(StoreSpec):
    def open(self, site): raise SystemExit(3)

class RefusesSpec(StoreSpec):
    def open(self, site):
        from tiers.errors import TierUnusable
        raise TierUnusable("no tape in the drive")
"""


@pytest.mark.fault
@pytest.mark.parametrize(
    ("kind", "says"),
    [("none", "open returned a NoneType"), ("exits", "SystemExit: 3"), ("refuses", "no tape in")],
)
def test_an_open_that_is_none_names_its_package(plugin: Install, kind: str, says: str) -> None:
    plugin("oddopen", ODD, none="NoneSpec", exits="ExitsSpec", refuses="RefusesSpec")
    spec = tier_class(kind).model_validate({"type": kind})
    assert isinstance(spec, StoreSpec)
    with pytest.raises(TierUnusable, match=rf"{kind} \(package oddopen 1.0\): .*{says}"):
        open_guarded(spec, SITE)
