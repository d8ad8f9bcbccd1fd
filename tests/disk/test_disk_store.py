"""What the disk tier keeps, for how long, in how much space."""

from __future__ import annotations

import errno
import os
import random
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.disk.audit import (
    PAYLOAD,
    SLOT,
    allocated,
    audit,
    folder_of,
    get,
    key,
    keys,
    open_disk,
    put,
)
from tiers.disk.slab import slot_bytes
from tiers.errors import TierFull, TierUnavailable

pytestmark = pytest.mark.usefixtures("mode")
SMALL = 9_000


def held(store: object, *numbers: int) -> list[int]:
    """Which of these numbers' keys the store has."""
    return [n for n in numbers if store.peek([key(n)])[0]]  # type: ignore[attr-defined]


def test_blocks_outlive_the_store(tmp_path: Path) -> None:
    for start in (0, 3):
        store = open_disk(tmp_path / "t")
        assert get(store, keys(0, 1, 2)) == [start > 0] * 3
        assert put(store, keys(start, start + 1, start + 2)) == [True] * 3
        store.close()
    store = open_disk(tmp_path / "t")
    assert get(store, keys(*range(6))) == [True] * 6
    audit(store)
    store.close()


def test_a_namespace_is_cleared_in_steps(tmp_path: Path) -> None:
    """Whoever clears millions can stop, and others store between the steps."""
    store = open_disk(tmp_path, slots=600)
    assert all(put(store, keys(*range(600))))
    left = [600]
    while store.clear(key(0)[:16]):
        left.append(store.usage().blocks)
        assert left[-2] - 256 <= left[-1] < left[-2]
    assert len(left) == 3 and store.usage().blocks == 0
    audit(store)
    store.close()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_capacity_holds_with_two_block_sizes(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    store = open_disk(tmp_path, slots=6)
    for _ in range(40):
        payload = chance.choice((PAYLOAD, SMALL))
        some = [key(n * 2 + (payload == SMALL)) for n in chance.sample(range(40), 5)]
        assert all(put(store, some, payload))
        assert get(store, some, payload) == [True] * 5
        if chance.random() < 0.2:
            store.drop(some[:2])
        usage = store.usage()
        assert usage.used <= 6 * SLOT
        assert allocated(tmp_path) <= 6 * SLOT
        audit(store)
    store.close()


def test_space_moves_between_block_sizes(tmp_path: Path) -> None:
    store = open_disk(tmp_path, slots=4)
    put(store, keys(0, 1, 2, 3))
    small = keys(*range(100, 100 + 4 * SLOT // slot_bytes(SMALL)))
    assert all(put(store, small, SMALL))
    assert held(store, 0, 1, 2, 3) == []
    assert allocated(tmp_path) <= 4 * SLOT
    assert all(put(store, keys(4, 5, 6, 7)))
    assert held(store, 4, 5, 6, 7) == [4, 5, 6, 7]
    audit(store)
    store.close()


def test_the_least_recently_used_block_goes_first(tmp_path: Path) -> None:
    store = open_disk(tmp_path, slots=4)
    for n in range(4):
        put(store, keys(n))
    get(store, keys(0))
    store.touch(keys(1))
    put(store, keys(2))
    put(store, keys(4))
    assert held(store, 0, 1, 2, 3, 4) == [0, 1, 2, 4]
    put(store, keys(5))
    assert held(store, 0, 1, 2, 4, 5) == [1, 2, 4, 5]
    store.close()


@pytest.mark.parametrize("verb", ["touch", "put", "put the missing", "get"])
def test_a_prefix_loses_its_tail_before_its_head(tmp_path: Path, verb: str) -> None:
    store = open_disk(tmp_path, slots=4)
    folder_of(store).upkeep.stop()  # it writes uses a second later, as if they were of then
    if verb == "put the missing":
        put(store, keys(0, 1))
        put(store, keys(0, 1, 2, 3))
    elif verb == "put":
        put(store, keys(0, 1, 2, 3))
    else:
        put(store, keys(3, 2, 1, 0))
        if verb == "touch":
            store.touch(keys(0, 1, 2, 3))
        else:
            get(store, keys(0, 1, 2, 3))
    for n, survivors in ((10, [0, 1, 2]), (11, [0, 1]), (12, [0])):
        put(store, keys(n))
        assert held(store, 0, 1, 2, 3) == survivors
    store.close()


def test_recency_outlives_the_store(tmp_path: Path) -> None:
    store = open_disk(tmp_path, slots=3)
    put(store, keys(0, 1, 2))
    store.touch(keys(2, 1))
    store.close()
    store = open_disk(tmp_path, slots=3)
    put(store, keys(3))
    assert held(store, 0, 1, 2, 3) == [1, 2, 3]
    store.close()


def test_a_batch_larger_than_the_tier_keeps_its_head(tmp_path: Path) -> None:
    store = open_disk(tmp_path, slots=4)
    put(store, keys(2, 50, 51))
    assert put(store, keys(*range(7))) == [True] * 4 + [False] * 3
    assert get(store, keys(*range(7))) == [True] * 4 + [False] * 3
    audit(store)
    store.close()


def test_a_block_larger_than_the_tier_evicts_nothing(tmp_path: Path) -> None:
    store = open_disk(tmp_path, slots=2)
    put(store, keys(0, 1))
    with pytest.raises(TierFull):
        put(store, keys(2), PAYLOAD * 3)
    assert get(store, keys(0, 1)) == [True, True]
    store.close()


def test_a_smaller_capacity_evicts_at_open(tmp_path: Path) -> None:
    store = open_disk(tmp_path, slots=6)
    for n in range(6):
        put(store, keys(n))
    store.close()
    store = open_disk(tmp_path, slots=2)
    assert held(store, *range(6)) == [4, 5]
    assert allocated(tmp_path) <= 2 * SLOT
    audit(store)
    store.close()


def test_both_halves_of_an_engine_share_one_folder(tmp_path: Path) -> None:
    scheduler, worker = open_disk(tmp_path), open_disk(tmp_path)
    put(worker, keys(0, 1))
    assert scheduler.peek(keys(0, 1, 2)) == [True, True, False]
    scheduler.close()
    scheduler.close()
    assert get(worker, keys(0, 1)) == [True, True]
    with pytest.raises(TierUnavailable):
        worker.close()
        worker.peek(keys(0))
    store = open_disk(tmp_path)
    assert get(store, keys(0, 1)) == [True, True]
    store.close()


@pytest.mark.parametrize("slots", [64, 40])
def test_a_batch_gets_its_space_by_one_call(
    tmp_path: Path, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no more than it uses, also where the tier has no room for all of it."""
    store, calls, allocate = open_disk(tmp_path, slots=slots), list[int](), os.posix_fallocate

    def counted(handle: int, offset: int, length: int) -> None:
        calls.append(length)
        allocate(handle, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", counted)
    put(store, keys(*range(64)))
    assert calls == [slots * SLOT]
    assert store.usage().used == slots * SLOT >= allocated(tmp_path)
    put(store, keys(*range(100, 110)))
    assert len(calls) == 1 or slots == 64, "evicted slots have their space"
    audit(store)
    store.close()


def test_a_quota_that_a_batch_exceeds_takes_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a quota leaves does not show in what is free."""
    store, allocate = open_disk(tmp_path, slots=64), os.posix_fallocate

    def limited(handle: int, offset: int, length: int) -> None:
        if offset + length > 5 * SLOT:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        allocate(handle, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    assert put(store, keys(*range(8))) == [True] * 5 + [False] * 3
    assert get(store, keys(*range(8))) == [True] * 5 + [False] * 3
    audit(store)
    store.close()


def test_dropped_blocks_give_their_space_back(tmp_path: Path) -> None:
    store = open_disk(tmp_path)
    put(store, keys(*range(8)))
    store.drop(keys(*range(7), 99))
    assert held(store, *range(8)) == [7]
    assert store.usage().used == SLOT
    assert allocated(tmp_path) <= SLOT
    store.close()


def test_threads_that_put_one_key_leak_no_slot(tmp_path: Path) -> None:
    store = open_disk(tmp_path, slots=16)
    barrier = threading.Barrier(6, timeout=30)
    answers: list[list[bool]] = []

    def work() -> None:
        for n in range(12):
            barrier.wait()
            answers.append(put(store, keys(n, n + 1)))

    run_all(work, 6)
    assert all(all(answer) for answer in answers)
    audit(store)
    assert not folder_of(store)._puts
    store.close()


def test_threads_that_evict_each_other_serve_right_blocks(tmp_path: Path) -> None:
    store = open_disk(tmp_path, slots=7)
    seeds = iter(range(100))
    hits: list[bool] = []

    def work() -> None:
        chance = random.Random(next(seeds))
        for _ in range(30):
            payload = chance.choice((PAYLOAD, SMALL))
            some = [key(n * 2 + (payload == SMALL)) for n in chance.sample(range(12), 3)]
            with suppress(TierFull):  # the others may hold every slot just now
                put(store, some, payload)
            hits.extend(get(store, some, payload))

    run_all(work, 6)
    assert any(hits)
    audit(store)
    store.close()


def run_all(work: object, count: int) -> None:
    """Run one function in several threads; an exception in any of them fails the test."""
    wrong: list[BaseException] = []

    def guarded() -> None:
        try:
            work()  # type: ignore[operator]
        except BaseException as error:  # noqa: BLE001 - raised again by the test's own thread
            wrong.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise wrong[0]
