"""Which blocks a tier's writer puts together, and in which order."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.kept import kept
from tiers.concurrency.executors import IoExecutor
from tiers.concurrency.rate_limit import RateLimit
from tiers.connector.worker.host_slots import HostSlots
from tiers.connector.worker.storing import Puts, batches, held_before, in_packs
from tiers.contract.messages import (
    NO_PLACE,
    PromptPlace,
    StoreItem,
    StoreJob,
)
from tiers.store import Block, Prefix, PutCounts
from tiers.testing import Memory, MemoryStore, make_key
from tiers.wrappers.guard import Guarded

WAIT_S = 60.0
SPACE = b"namespace-16-byt"


class Host:
    """Slots of 1 MiB, of which a store takes 32 at once. A slot from 1,000 on was not gathered, and
    the gather of slot 2,000 failed."""

    payload_bytes = 1 << 20
    engine = SimpleNamespace(kv_events=True, rank=0)
    memory = SimpleNamespace(payload=lambda slot: memoryview(bytearray(1)))
    unchanged = SimpleNamespace(
        unchanged=lambda: True, unchanged_everywhere=lambda: True, waits_for_others=lambda: False
    )
    watch = SimpleNamespace(stores=lambda tag: Host.unchanged)
    checksums = SimpleNamespace(of=lambda slots: [None] * len(slots))

    def now(self) -> float:
        return 0.0

    def wait_and_verify(self, slots: Sequence[int], keys: Sequence[bytes]) -> list[bool]:
        if 2000 in slots:
            raise RuntimeError("the device failed")
        return [slot < 1000 for slot in slots]


class Store:
    """Refuses keys that begin with `no`, and had those that begin with `had`. Its first put waits
    until it may go on."""

    def __init__(self) -> None:
        self.begun, self.over = threading.Event(), threading.Event()
        self.puts: list[list[bytes]] = []

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return [key[16:].startswith(b"had") for key in keys]

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        self.begun.set()
        assert self.over.wait(WAIT_S)
        self.puts.append([block.key[16:] for block in blocks])
        return [not block.key[16:].startswith(b"no") for block in blocks]

    def counts(self) -> PutCounts:
        """Of those that it had."""
        return PutCounts(renewed=sum(k.startswith(b"had") for keys in self.puts for k in keys))


def job(number: int, *keys: bytes, slot: int = 0, generation: bytes = b"") -> StoreJob:
    return StoreJob(number, [StoreItem(key, slot, None) for key in keys], generation)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def puts(store: Store) -> Iterator[Puts]:
    writer = IoExecutor(1, "test")
    made = Puts(cast(Any, Host()), RateLimit(None), writer, in_host=False)
    made.serve(cast(Guarded, store), SPACE)
    yield made
    store.over.set()
    writer.shutdown()


def test_jobs_that_wait_are_put_together(puts: Puts, store: Store) -> None:
    before = kept(puts)
    futures = [puts.begin(job(0, b"first"), True)]
    assert store.begun.wait(WAIT_S)
    futures += [
        puts.begin(job(1, b"a", b"no b"), True),
        puts.begin(job(2, b"had c"), True),
        puts.begin(job(3, b"d", slot=1000), True),
        puts.begin(job(4, *[b"%d" % n for n in range(28)]), True),
        puts.begin(job(5, b"last"), True),
    ]
    store.over.set()
    results = [future.result(WAIT_S) for future in futures]
    assert [len(put) for put in store.puts] == [1, 3, 28, 1], "an eighth of what waits, at most"
    assert [result.failed for result in results] == [set(), {1}, set(), {0}, set(), set()]
    assert [result.already_stored for result in results] == [set(), set(), {0}, set(), set(), set()]
    assert kept(puts) == before


def test_what_differs_is_put_apart(puts: Puts, store: Store) -> None:
    futures = [puts.begin(job(0, b"first"), True)]
    assert store.begun.wait(WAIT_S)
    futures += [
        puts.begin(job(1, b"old"), True),
        puts.begin(job(2, b"new", generation=b"g" * 16), True),
        puts.begin(job(3, b"of another rank", generation=b"g" * 16), False),
        puts.begin(job(4, *[b"%d" % n for n in range(40)]), True),
        puts.begin(job(5, b"last"), True),
    ]
    store.over.set()
    assert [future.result(WAIT_S).failed for future in futures] == [set()] * 6
    assert [len(put) for put in store.puts] == [1, 1, 1, 8, 32, 1]


@pytest.mark.parametrize("packs", [False, True])
def test_the_first_batch_of_a_prompt_is_put_last_unless_packs_are_found_by_it(
    puts: Puts, store: Store, packs: bool
) -> None:
    store.over.set()
    keys = [b"%02d" % number for number in range(40)]
    keys[1] = b"no"
    place = PromptPlace(keys, range(40), 8) if packs else NO_PLACE
    result = puts.begin(replace(job(0, *keys), place=place), True).result(WAIT_S)
    assert store.puts == ([keys[:32], keys[32:]] if packs else [keys[32:], keys[:32]])
    assert result.failed == {1}


def test_a_gather_that_failed_fails_one_job(puts: Puts, store: Store) -> None:
    futures = [puts.begin(job(0, b"first"), True)]
    assert store.begun.wait(WAIT_S)
    futures += [
        puts.begin(job(1, b"a"), True),
        puts.begin(job(2, b"lost", slot=2000), True),
        puts.begin(job(3, b"b"), True),
        puts.begin(job(4, *[b"%d" % n for n in range(40)]), True),
    ]
    store.over.set()
    with pytest.raises(RuntimeError, match="the device failed"):
        futures.pop(2).result(WAIT_S)
    assert [future.result(WAIT_S).failed for future in futures] == [set()] * 4
    assert store.puts[:3] == [[b"first"], [b"a"], [b"b"]]


def test_nothing_is_held_up_in_host_memory() -> None:
    """A tier that has nothing to put waits for no other job's gather."""
    writer = IoExecutor(1, "test")
    gathered = threading.Event()
    host = Host()

    def wait_and_verify(slots: Sequence[int], keys: Sequence[bytes]) -> list[bool]:
        assert slots == [0] or gathered.wait(WAIT_S)
        return [True] * len(slots)

    host.wait_and_verify = wait_and_verify  # type: ignore[method-assign]
    blocked = threading.Event()
    writer.submit(blocked.wait, WAIT_S)
    puts = Puts(cast(HostSlots, host), RateLimit(None), writer, in_host=True)
    first, second = (puts.begin(job(n, b"k", slot=n), True) for n in range(2))
    blocked.set()
    assert first.result(WAIT_S).failed == set()
    assert not second.done()
    gathered.set()
    assert second.result(WAIT_S).failed == set()
    writer.shutdown()


# -- batches, which end where groups of a prompt do, so that packs are whole


def _numbered(first: int, count: int, group: int) -> list[Prefix | None]:
    keys = [make_key() for _ in range(first + count)]
    return [Prefix(keys, at, group) for at in range(first, first + count)]


def test_a_batch_ends_where_a_group_does_or_where_it_must() -> None:
    assert list(batches(_numbered(1, 30, 4), 16)) == [range(15), range(15, 30)]
    assert list(batches(_numbered(0, 48, 16), 16)) == [range(16), range(16, 32), range(32, 48)]
    assert list(batches(_numbered(1, 9, 64), 4)) == [range(4), range(4, 8), range(8, 9)]
    assert list(batches([None] * 5, 2)) == [range(2), range(2, 4), range(4, 5)]
    assert list(batches([], 4)) == []


def test_a_batch_ends_where_another_prompt_begins() -> None:
    """A group of that would be parted, and lie in two packs."""
    one, other = _numbered(0, 10, 16), _numbered(0, 10, 16)
    assert list(batches([*one, *other], 16)) == [range(10), range(10, 20)]
    assert list(batches([*one, None], 10)) == [range(10), range(10, 11)]


class Packing(MemoryStore):
    """Holds the first three blocks of each group, and no block by itself."""

    def pack_blocks(self) -> int:
        return 4

    def held_prefix(self, prompts: Sequence[Sequence[bytes]]) -> list[int]:
        return [min(3, len(keys)) for keys in prompts]


def test_a_store_that_packs_is_asked_for_groups() -> None:
    of_one, of_other = _numbered(1, 4, 4), _numbered(2, 2, 4)
    names = [make_key() for _ in range(6)]
    held = held_before(Packing(), names, of_one + of_other)
    assert held == [True, True, False, True, True, False]
    store = Packing()
    store.put(Memory(names[:1], 16).fill().blocks)
    held = held_before(store, names, [None, None, *of_one])
    assert held == [True, False, True, True, False, True]
    assert held_before(MemoryStore(), names, of_one + of_other) == [False] * 6


def test_blocks_of_one_prefix_are_put_in_a_row_and_others_as_they_came() -> None:
    one, other = _numbered(0, 2, 4), _numbered(0, 2, 4)
    assert in_packs([one[0], None, other[0], one[1], None, other[1]]) == [0, 3, 2, 5, 1, 4]
    assert in_packs([None] * 3) == [0, 1, 2]
