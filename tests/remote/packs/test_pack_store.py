"""A store of packs over a bucket that takes its time, or has packs of a later version."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from spec.offloading import StoreContext, StoreSpec
from tests.remote.packs.places import KINDS, FolderBucket, SharedDirectory
from tests.support.clock import wait_for
from tiers.block import Buffer
from tiers.concurrency.executors import in_background
from tiers.errors import TierNotOpen, TierRefused, TierUnavailable, TierUnusable
from tiers.remote.object_spec import ObjectSpec
from tiers.remote.packs import pack
from tiers.remote.packs.pack_store import PackStore
from tiers.remote.shared.directory_bucket import DirectoryBucket
from tiers.remote.shared_spec import SharedSpec
from tiers.store import Block, Damages, GatheredBlock, Prefix, TierStore, Waiting, capability
from tiers.testing import Memory, make_key

PAYLOAD = 4096
CONNECTIONS = 8


class Held(DirectoryBucket):
    """Deletes nothing before it may."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.deletes = 0
        self.may_delete = threading.Event()

    def delete(self, names: Sequence[str]) -> None:
        self.deletes += 1
        assert self.may_delete.wait(60)
        super().delete(names)


def test_many_are_dropped_at_once_and_look_ups_go_on(tmp_path: Path) -> None:
    """One after the other, what a reset leaves would take longer than a tier's deadline."""
    place = tmp_path / "shared"
    place.mkdir(0o700)
    bucket, keys = Held(place), [make_key() for _ in range(40)]
    store = PackStore(bucket, PAYLOAD, timeout=60, connections=CONNECTIONS)
    try:
        assert all(store.put(Memory(keys, PAYLOAD).fill().blocks))
        with ThreadPoolExecutor(1) as other:
            dropping = other.submit(store.drop, keys)
            wait_for(lambda: bucket.deletes == CONNECTIONS // 2)
            assert all(store.has(keys[:5])), "while others are deleted"
            bucket.may_delete.set()
            dropping.result()
        assert bucket.deletes == len(keys) and not any(store.has(keys))
    finally:
        bucket.may_delete.set()
        store.close()


class Failing(DirectoryBucket):
    """Raises this of each call for one of these packs."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.of: set[str] = set()
        self.calls = 0
        self.error: Exception = TierUnavailable("no answer")

    def _may_fail(self, name: str) -> None:
        self.calls += 1
        if name in self.of:
            raise self.error

    def read(self, name: str, start: int, into: Sequence[memoryview]) -> int | None:
        self._may_fail(name)
        return super().read(name, start, into)

    def put(self, name: str, parts: Sequence[Buffer]) -> bool:
        self._may_fail(name)
        return super().put(name, parts)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._may_fail(name)
        super().delete(names)


def test_what_some_packs_fail_of_is_missing_and_where_all_fail_that_is_said(tmp_path: Path) -> None:
    """Else a server that is down would be asked on and on, as one that has nothing."""
    (tmp_path / "shared").mkdir(0o700)
    bucket, keys = Failing(tmp_path / "shared"), [make_key() for _ in range(2)]
    store = PackStore(bucket, PAYLOAD, timeout=60, connections=CONNECTIONS)
    names, blocks = [pack.name_of(key) for key in keys], Memory(keys, PAYLOAD).fill().blocks
    try:
        bucket.of = {*names}
        for verb in (store.put, store.get):
            bucket.calls = 0
            with pytest.raises(TierUnavailable, match="no answer"):
                verb(blocks)
            assert bucket.calls == 2, "one for each"
        for look in (store.has, lambda keys: store.held_prefix([[key] for key in keys])):
            with pytest.raises(TierUnavailable, match="no answer"):
                look(keys)
        bucket.of = {names[1]}
        assert store.put(blocks) == [True, False]
        assert store.has(keys) == [True, False]
        bucket.of = set()
        assert store.put(blocks) == [True, True]
        bucket.of = {names[1]}
        assert store.get(blocks) == [True, False]
        with pytest.raises(TierUnavailable):
            store.drop(keys)
        bucket.of = set()
        assert store.has(keys) == [False, True]
        bucket.of, bucket.error = {names[1]}, ValueError("a defect")
        with pytest.raises(ValueError, match="a defect"):
            store.get(blocks)
    finally:
        store.close()


def cut_to(size: int) -> Callable[[Path], None]:
    return lambda file: os.truncate(file, size)


def with_another_bit(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def under_a_folder(file: Path) -> None:
    """It can be read no more."""
    file.rename(file.with_name("moved"))
    file.mkdir()


HARMS = {
    "empty": cut_to(0),
    "cut": cut_to(pack.INDEX_BYTES - 1),
    "changed": with_another_bit,
    "not to be read": under_a_folder,
}


@pytest.mark.fault
@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_pack_that_can_t_be_used_takes_no_other_along(
    kind: type[SharedDirectory | FolderBucket], harm: Callable[[Path], None], tmp_path: Path
) -> None:
    place, keys = kind(tmp_path / "kept"), [make_key() for _ in range(3)]
    site, file = StoreContext(PAYLOAD), place.path / pack.name_of(keys[1])
    with closing(place.spec(None).open(site)) as store:
        assert store.put(Memory(keys, PAYLOAD).fill().blocks) == [True] * 3
    for look in ("has", "held_prefix"):
        harm(file)
        with closing(place.spec(None).open(site)) as store:
            if look == "has":
                assert store.has(keys) == [True, False, True]
            else:
                assert store.held_prefix([keys[:1], keys[1:2], keys[2:]]) == [1, 0, 1]
            assert store.get(Memory(keys, PAYLOAD).blocks) == [True, False, True]
            is_gone = not file.is_dir()
            assert store.put(Memory(keys, PAYLOAD).fill().blocks) == [True, is_gone, True]
            if not is_gone:
                file.rmdir()
                file.with_name("moved").rename(file)
            assert store.get(Memory(keys, PAYLOAD).blocks) == [True] * 3


def test_a_put_of_which_a_part_fails_says_what_is_stored(tmp_path: Path) -> None:
    keys = [make_key() for _ in range(2)]

    class Half(DirectoryBucket):
        refused = 0

        def put(self, name: str, parts: Sequence[Buffer]) -> bool:
            if name == pack.name_of(keys[1]):
                self.refused += 1
                raise TierUnavailable("no answer")
            return super().put(name, parts)

    (tmp_path / "shared").mkdir(0o700)
    bucket = Half(tmp_path / "shared")
    store = PackStore(bucket, PAYLOAD, timeout=60, connections=CONNECTIONS)
    try:
        assert store.put(Memory(keys, PAYLOAD).fill().blocks) == [True, False]
        assert bucket.refused == 1, "a server in trouble is sent it once"
        assert store.has(keys) == [True, False]
        for some in (keys[1:], keys):  # of both, nothing new is stored
            with pytest.raises(TierUnavailable, match="no answer"):
                store.put(Memory(some, PAYLOAD).fill().blocks)
    finally:
        store.close()


@pytest.mark.parametrize("verb", ["has", "drop"])
def test_a_verb_begins_nothing_when_its_time_is_over(tmp_path: Path, verb: str) -> None:
    class Late(Failing):
        def _may_fail(self, name: str) -> None:
            super()._may_fail(name)
            time.sleep(0.1)

    (tmp_path / "shared").mkdir(0o700)
    bucket = Late(tmp_path / "shared")
    store = PackStore(bucket, PAYLOAD, timeout=0.05, connections=1)
    try:
        with pytest.raises(TierUnavailable, match="no answer in time"):
            getattr(store, verb)([make_key() for _ in range(9)])
        assert bucket.calls <= 2
    finally:
        store.close()


class Slow(DirectoryBucket):
    """Reads nothing before it may."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.reading = self.reads = 0
        self.may_read = threading.Event()

    def read(self, name: str, start: int, into: Sequence[memoryview]) -> int | None:
        self.reading += 1
        self.reads += 1
        assert self.may_read.wait(60)
        time.sleep(0.01)
        self.reading -= 1
        return super().read(name, start, into)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[Slow, PackStore]]:
    (tmp_path / "shared").mkdir(0o700)
    bucket = Slow(tmp_path / "shared")
    store = PackStore(bucket, PAYLOAD, timeout=60, connections=1)
    yield bucket, store
    bucket.may_read.set()
    store.close()


@pytest.mark.fault
def test_a_verb_ends_whose_store_is_closed_meanwhile(slow: tuple[Slow, PackStore]) -> None:
    """One that was lost is closed and opened anew: no verb may wait for the old one for ever."""
    bucket, store = slow
    asked = in_background(lambda: store.has([make_key() for _ in range(9)]), "asked")
    wait_for(lambda: bucket.reading == 2)
    store.close()
    bucket.may_read.set()
    with pytest.raises(TierNotOpen, match="closed"):
        asked.result(20)


@pytest.mark.fault
def test_a_verb_that_ends_early_leaves_nothing_that_writes_into_its_memory(
    slow: tuple[Slow, PackStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is closed while a load begins its reads: another load is given that memory next."""
    bucket, store = slow
    submit, memory = store._threads.submit, Memory([make_key() for _ in range(9)], PAYLOAD)

    def closing(*args: Any) -> Any:
        begun = submit(*args)
        wait_for(lambda: bucket.reading == 1)
        store.close()
        bucket.may_read.set()
        return begun

    monkeypatch.setattr(store._threads, "submit", closing)
    with pytest.raises(TierNotOpen, match="closed"):
        store.get(memory.blocks)
    assert bucket.reads == 1 and not bucket.reading


@pytest.mark.fault
def test_a_pack_of_a_later_version_is_a_miss_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else, as engines are upgraded one by one, the old ones delete all that the new ones store."""
    caplog.set_level(logging.WARNING)
    place = tmp_path / "shared"
    place.mkdir(0o700)
    keys = [make_key() for _ in range(3)]

    def opened() -> PackStore:
        return PackStore(DirectoryBucket(place), PAYLOAD, timeout=60, connections=CONNECTIONS)

    with monkeypatch.context() as later:
        later.setattr(pack, "PACK_VERSION", pack.PACK_VERSION + 1)
        new = opened()
        assert all(new.put(Memory(keys, PAYLOAD).fill().blocks))
    old = opened()
    assert not any(old.has(keys)) and not any(old.put(Memory(keys, PAYLOAD).fill().blocks))
    for key in keys:  # a record in it that verifies may be served
        memory = Memory([key], PAYLOAD)
        assert old.get(memory.blocks) in ([False], [memory.holds(0)])
    assert old.damaged() == 0
    assert sum("another version of kvtiers" in line for line in caplog.messages) == 1
    old.close()
    new.close()
    monkeypatch.setattr(pack, "PACK_VERSION", pack.PACK_VERSION + 1)
    new = opened()
    assert all(new.has(keys)), "the old version has left them alone"
    new.close()


def test_a_pack_under_another_s_name_is_a_miss_and_goes(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(0o700)
    bucket, (key, other) = DirectoryBucket(tmp_path / "shared"), (make_key(), make_key())
    store = PackStore(bucket, PAYLOAD, timeout=60, connections=CONNECTIONS)
    assert store.put(Memory([key], PAYLOAD).fill().blocks) == [True]
    whole = memoryview(bytearray(pack.record_start(1, PAYLOAD)))
    assert bucket.read(pack.name_of(key), 0, [whole]) == len(whole)
    assert bucket.put(pack.name_of(other), [whole])
    assert store.get(Memory([other], PAYLOAD).blocks) == [False]
    assert (store.damaged(), store.has([key, other])) == (1, [True, False])
    assert store.put(Memory([other], PAYLOAD).fill().blocks) == [True]
    assert store.get(Memory([key, other], PAYLOAD).blocks) == [True, True]
    store.close()


def test_a_pack_of_blocks_of_another_length_is_a_miss_and_stays(tmp_path: Path) -> None:
    keys = [make_key() for _ in range(3)]
    (tmp_path / "shared").mkdir(0o700)
    store, other = (
        SharedSpec(path=tmp_path / "shared").open(StoreContext(length))
        for length in (PAYLOAD, 2 * PAYLOAD)
    )
    assert all(other.put(Memory(keys, 2 * PAYLOAD).fill().blocks))
    for _ in range(2):
        assert not any(store.has(keys)) and not any(store.get(Memory(keys, PAYLOAD).blocks))
    damages = capability(store, Damages)
    assert damages is not None and damages.damaged() == 0
    assert all(other.get(Memory(keys, 2 * PAYLOAD).blocks))
    store.close()
    other.close()


def test_an_index_that_did_not_come_in_time_is_not_damaged(tmp_path: Path) -> None:
    """A bucket gives up in the midst of a read, with its caller: what it has is no whole index."""
    left, keys = [60.0], [make_key()]

    class Late(DirectoryBucket):
        def read(self, name: str, start: int, into: Sequence[memoryview]) -> int | None:
            left[0] = 0.0
            return super().read(name, start, [into[0][:100]])

    (tmp_path / "shared").mkdir(0o700)
    store = PackStore(Late(tmp_path / "shared"), PAYLOAD, timeout=60, connections=CONNECTIONS)
    other = SharedSpec(path=tmp_path / "shared").open(StoreContext(PAYLOAD))
    assert other.put(Memory(keys, PAYLOAD).fill().blocks) == [True]
    with Waiting(lambda: left[0]), pytest.raises(TierUnavailable, match="in time"):
        store.has(keys)
    assert (store.damaged(), other.get(Memory(keys, PAYLOAD).blocks)) == (0, [True])
    store.close()
    other.close()


class Hooked(DirectoryBucket):
    """Calls `before` before the records of a pack are read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.before: Callable[[str], None] = lambda name: None

    def read(self, name: str, start: int, into: Sequence[memoryview]) -> int | None:
        if start:
            self.before(name)
        return super().read(name, start, into)


def _placed(prompt: Sequence[bytes], first: int) -> list[Block]:
    """Blocks of a prompt, from number `first` on."""
    memory = Memory(prompt[first:], PAYLOAD).fill()
    places = (Prefix(prompt, first + number, 64) for number in range(len(prompt)))
    blocks = zip(memory.blocks, places, strict=False)
    return [GatheredBlock(block.key, block.payload, None, place) for block, place in blocks]


def test_a_block_that_is_asked_for_twice_in_a_prompt_comes_twice(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(0o700)
    bucket, keys = DirectoryBucket(tmp_path / "shared"), [make_key() for _ in range(3)]
    store = PackStore(bucket, PAYLOAD, timeout=60, connections=CONNECTIONS)
    stored, twice = _placed(keys, 0), [*_placed(keys, 0), *_placed(keys, 0)]
    try:
        assert all(store.put(stored))
        for block in twice:
            block.payload[:] = bytes(PAYLOAD)
        assert store.get(twice) == [True] * 6
        assert [bytes(one.payload) for one in twice] == 2 * [bytes(one.payload) for one in stored]
    finally:
        store.close()


def test_records_that_did_not_come_in_time_are_not_damaged(tmp_path: Path) -> None:
    """Else a load that is given up deletes what it asked for."""
    left, keys = [60.0], [make_key() for _ in range(3)]

    class Late(DirectoryBucket):
        def read(self, name: str, start: int, into: Sequence[memoryview]) -> int | None:
            if start and name == pack.name_of(keys[1]):
                left[0], into = 0.0, into[:1]
            return super().read(name, start, into)

    (tmp_path / "shared").mkdir(0o700)
    store = PackStore(Late(tmp_path / "shared"), PAYLOAD, timeout=60, connections=CONNECTIONS)
    other = SharedSpec(path=tmp_path / "shared").open(StoreContext(PAYLOAD))
    assert all(other.put(_placed(keys, 1)))
    with Waiting(lambda: left[0]):
        assert not any(store.get(_placed(keys, 1)))
    assert left == [0.0]
    assert (store.damaged(), other.get(_placed(keys, 1))) == (0, [True, True])
    store.close()
    other.close()


@pytest.mark.parametrize("notices", ["it is to forget", "a load finds nothing"])
def test_what_another_deleted_is_believed_until_that_is_noticed(
    tmp_path: Path, notices: str
) -> None:
    (tmp_path / "shared").mkdir(0o700)
    store, other = (SharedSpec(path=tmp_path / "shared").open(StoreContext(PAYLOAD)) for _ in "ab")
    keys = [make_key() for _ in range(3)]
    assert all(store.put(_placed(keys, 0)))
    other.drop(keys)
    assert store.held_prefix([keys]) == [3]
    if notices == "it is to forget":
        store.forget()
    else:
        assert not any(store.get(_placed(keys, 0)))
    assert store.held_prefix([keys]) == [0]
    store.close()
    other.close()


@pytest.mark.fault
def test_a_pack_that_another_process_put_meanwhile_is_not_damaged(tmp_path: Path) -> None:
    """Between two reads of a load a pack is evicted, and one that begins alike is put."""
    (tmp_path / "shared").mkdir(0o700)
    bucket = Hooked(tmp_path / "shared")
    store = PackStore(bucket, PAYLOAD, timeout=60, connections=CONNECTIONS)
    other = SharedSpec(path=tmp_path / "shared").open(StoreContext(PAYLOAD))
    keys = [make_key() for _ in range(8)]
    theirs = [*keys[:5], *(make_key() for _ in range(3))]
    assert all(other.put(_placed(keys[:3], 0)) + other.put(_placed(keys, 3)))

    read: list[str] = []

    def replace(name: str) -> None:
        read.append(name)
        if name == pack.name_of(keys[3]) and read.count(name) == 1:
            other.drop([keys[3]])
            assert all(other.put(_placed(theirs, 3)))

    bucket.before = replace
    assert store.get(_placed(keys, 0)) == [True] * 5 + [False] * 3
    assert read.count(pack.name_of(keys[0])) == 1, "nothing is read over what has come"
    assert store.damaged() == 0
    assert all(other.get(_placed(theirs, 0)))
    store.close()
    other.close()


@pytest.mark.parametrize(
    "answer", ["as it was", "and stays", None, TierUnavailable("no answer")], ids=str
)
def test_a_pack_is_damaged_if_its_index_still_says_what_did_not_verify(
    tmp_path: Path, answer: object
) -> None:
    """Else it is gone, or its server is, and is not deleted for that."""

    class Changing(DirectoryBucket):
        looks = 0

        def read(self, name: str, start: int, into: Sequence[memoryview]) -> int | None:
            self.looks += not start
            if self.looks == 2 and isinstance(answer, Exception):
                raise answer
            return None if self.looks == 2 and answer is None else super().read(name, start, into)

        def delete(self, names: Sequence[str]) -> None:
            if answer == "and stays" and names:
                raise TierRefused("it may only read")
            super().delete(names)

    (tmp_path / "shared").mkdir(0o700)
    bucket, keys = Changing(tmp_path / "shared"), [make_key() for _ in range(3)]
    store = PackStore(bucket, PAYLOAD, timeout=60, connections=1)
    try:
        assert all(store.put(_placed(keys, 0)))
        store.forget()
        (file,) = (path for path in (tmp_path / "shared").rglob("*") if path.is_file())
        file.chmod(0o600)
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        bucket.looks = 0
        assert store.get(_placed(keys, 0)) == [True, True, False]
        assert bucket.looks == 2
        bucket.looks = 3  # and all answers are as they are from now on
        is_damaged, goes = isinstance(answer, str), answer == "as it was"
        assert (store.damaged(), file.exists()) == (int(is_damaged), not goes)
        assert store.held_prefix([keys]) == [0 if goes else 3], "no index of it is believed"
        assert store.get(_placed(keys, 2)) == [False], "a miss, also where nothing can be deleted"
    finally:
        store.close()


def _refusals(store: TierStore, keys: list[bytes]) -> int:
    """How many verbs say that the process was forked."""
    refusals = 0
    verbs: list[Callable[[], object]] = [
        lambda: store.has(keys),
        lambda: store.get(Memory(keys, PAYLOAD).blocks),
        lambda: store.put(Memory(keys, PAYLOAD).fill().blocks),
        lambda: store.drop(keys),
    ]
    for verb in verbs:
        try:
            verb()
        except TierUnusable as error:
            refusals += "forked" in str(error)
    return refusals


@pytest.mark.fault
@pytest.mark.parametrize("tier", ["shared", "object"])
def test_a_forked_child_is_refused_and_does_not_hang(tmp_path: Path, tier: str) -> None:
    tmp_path.chmod(0o700)
    specs: dict[str, StoreSpec] = {
        "shared": SharedSpec(path=tmp_path),
        "object": ObjectSpec(url=f"file://{tmp_path}"),
    }
    store = specs[tier].open(StoreContext(PAYLOAD))
    keys = [make_key() for _ in range(3)]
    assert all(store.put(Memory(keys, PAYLOAD).fill().blocks))
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # ends one that hangs
        try:
            os._exit(sum(_refusals(store, some) for some in (keys[:1], keys)))
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 8
    assert store.has(keys) == [True] * 3
    store.close()
