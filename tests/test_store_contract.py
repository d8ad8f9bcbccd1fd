"""Every store of ours, and the least a plugin's author writes, keeps the store contract."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal
from unittest import SkipTest
from unittest.mock import patch

import pytest

from spec.offloading import KEY_BYTES, StoreContext, StoreSpec
from tests.support.clock import Clock
from tests.support.damage import PackMedium, ServerMedium, SlabMedium
from tests.support.servers import RedisServer
from tiers.block import NAMESPACE_BYTES, address_of, digest
from tiers.disk.spec import DiskSpec
from tiers.errors import TierError
from tiers.remote.object_spec import ObjectSpec
from tiers.remote.shared_spec import SharedSpec
from tiers.remote.spec import RedisSpec
from tiers.store import Block, GatheredBlock, TierStore, Usage
from tiers.testing import GivenSpec, Memory, MemoryStore, StoreContract, make_key
from tiers.testing.harness import Medium
from tiers.testing.memory_tests import check_left, counted
from tiers.testing.template.kit import TestTemplate  # noqa: F401 - pytest runs it
from tiers.wrappers import put_process
from tiers.wrappers.encryption import BlockCipher, EncryptedStore, encrypted_bytes
from tiers.wrappers.guard import Guarded
from tiers.wrappers.put_process import PutsApart

pytestmark = pytest.mark.long


class Same:
    """Skips tests that take long, and would show nothing new of the same store."""

    def _skip(self) -> None:
        raise SkipTest(f"the class that {type(self).__name__} inherits from tries it")

    test_another_process_sees_what_was_put = _skip
    test_it_serves_on_after_a_fork = _skip
    test_nothing_is_left_behind = _skip
    test_a_place_that_was_closed_is_let_go = _skip
    test_what_is_dropped_gives_its_memory_back = _skip
    test_an_open_that_gets_too_few_threads_leaves_none = _skip


class Tier(StoreContract):
    """A tier of ours, which keeps a payload's checksum where it is known."""

    shared = True
    persistent = True
    verifies = True

    def open_store(self, payload_bytes: int) -> TierStore:
        spec = self.make_spec()
        assert spec is not None
        store: TierStore = spec.open(StoreContext(payload_bytes))
        return store

    def name(self, key: bytes) -> bytes:
        """What it calls a block."""
        return key

    def test_what_changed_behind_its_checksum_is_a_miss(self) -> None:
        keys = [make_key() for _ in range(2)]
        memory = Memory(keys, self.payload_bytes).fill()
        blocks = [GatheredBlock(*block, digest(block.payload)) for block in memory.blocks]
        blocks[0].payload[-1] ^= 1
        with self.opened() as store:
            assert list(store.put(blocks))[1]
            assert self.hits(store, keys) == [False, True]

    def test_an_open_that_gets_too_few_threads_leaves_none(self) -> None:
        before, begin = counted(), threading.Thread.start
        for most in itertools.count():
            begun = itertools.count()

            def start(thread: threading.Thread, most: int = most, begun: Any = begun) -> None:
                if next(begun) >= most:
                    raise RuntimeError("can't start new thread")
                begin(thread)

            with patch.object(threading.Thread, "start", start):
                try:
                    store = self.open_store(self.payload_bytes)
                except (RuntimeError, TierError):
                    continue
            store.close()
            break
        check_left(before, "opens without enough threads")


class TestMemory(StoreContract):
    shared = False
    persistent = False
    verifies = False

    def open_store(self, payload_bytes: int) -> TierStore:
        return MemoryStore()


class BehindAGuard(Same, Tier):
    """A guard's answer to an error is a miss, and a trial later."""

    def open_store(self, payload_bytes: int) -> TierStore:
        return Guarded(super().open_store(payload_bytes), "tier")

    def _guarded(self) -> None:
        raise SkipTest(f"{type(self).__name__} is guarded")

    test_errors_are_raised = _guarded
    test_what_could_not_be_written_is_not_held = _guarded


class StoredApart(Same, Tier):
    """Another process puts the blocks, as a worker's beside its scheduler does: what this one knows
    of their use is written within a second. All other verbs are the store's own."""

    PUTS = (
        "what_was_put_is_got",
        "nothing_asked_nothing_answered",
        "a_key_twice_in_one_batch",
        "putting_a_key_again_is_harmless",
        "keys_of_every_length_and_byte",
        "memory_of_any_alignment",
        "odd_payload_lengths",
        "memory_is_the_callers_again_after_each_call",
        "what_changed_behind_its_checksum_is_a_miss",
        "a_whole_batch",
        "many_threads_at_once",
        "what_put_says_is_held_is_held",
        "puts_are_counted",
        "full_it_keeps_what_came_last",
        "a_prefix_is_evicted_from_its_tail",
        "a_smaller_capacity_keeps_what_was_used_last",
        "errors_are_raised",
        "what_could_not_be_written_is_not_held",
        "a_put_that_is_given_up_says_what_is_held",
        "two_open_stores_see_each_other",
        "closing_twice_is_harmless",
    )
    """Tests that show something of a put."""
    test_an_open_that_gets_too_few_threads_leaves_none = (
        Tier.test_an_open_that_gets_too_few_threads_leaves_none
    )

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        shown = {f"test_{name}" for name in StoredApart.PUTS}
        assert shown < {*dir(cls)}
        for name in dir(cls):
            if name.startswith("test_") and name not in shown | vars(StoredApart).keys():
                setattr(cls, name, None)

    @pytest.fixture(autouse=True)
    def _always(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From the first block on, and a prompt by parts of it."""
        monkeypatch.setattr(put_process._Process, "has_answered", lambda *_: True)
        monkeypatch.setattr(put_process, "PART_BYTES", 3 * self.payload_bytes)

    def open_store(self, payload_bytes: int) -> TierStore:
        store, site = super().open_store(payload_bytes), StoreContext(payload_bytes)
        return PutsApart(store, self.make_spec(), site, "tier")


class TestRedis(Tier):
    codec: ClassVar[Literal["none", "zstd", "byteplanes"]] = "none"

    @pytest.fixture(autouse=True)
    def _place(self, shared_server: RedisServer) -> None:
        self.url = shared_server.url

    def make_spec(self) -> RedisSpec:
        return RedisSpec.model_validate(
            {"url": self.url, "ttl": "10m", "timeout": "30s", "codec": self.codec}
        )

    def medium(self, store: TierStore) -> Medium:
        return ServerMedium(self.url, self.name)


class TestRedisCompressed(Same, TestRedis):
    codec = "zstd"


class TestRedisInPlanes(Same, TestRedis):
    codec = "byteplanes"


class TestRedisOverUnixSocket(Same, TestRedis):
    @pytest.fixture(autouse=True)
    def _place(self, shared_server: RedisServer) -> None:
        self.url = shared_server.unix_url


class TestGuardedRedis(BehindAGuard, TestRedis):
    pass


class Encrypted(Same, Tier):
    """A store's blocks under the first of `keys`, of which all are read."""

    keys: tuple[bytes, ...] = (b"k" * KEY_BYTES, b"o" * KEY_BYTES)

    def open_store(self, payload_bytes: int) -> TierStore:
        inner = super().open_store(encrypted_bytes(payload_bytes))
        return EncryptedStore(inner, self.keys, payload_bytes)

    def name(self, key: bytes) -> bytes:
        return BlockCipher(self.keys[0]).names.of([key])[0]


class InPacks(Tier):
    path: Path

    def medium(self, store: TierStore) -> Medium:
        return PackMedium(self.path, self.name)

    def test_a_batch_with_less_room_than_it_needs(self) -> None:
        raise SkipTest("it makes room in rounds, beside its puts (remote/packs/test_evictor.py)")


class TestObject(InPacks):
    """Over a folder of files: the client's own code, without a server."""

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        pytest.importorskip("obstore")
        self.path = tmp_path / "bucket"

    def make_spec(self) -> ObjectSpec:
        return ObjectSpec.model_validate({"type": "object", "url": f"file://{self.path}"})

    @contextlib.contextmanager
    def failing(self, store: TierStore) -> Iterator[None]:
        """Everything in the bucket is in the way of itself."""
        away = self.path.with_suffix(".away")
        self.path.rename(away)
        self.path.write_bytes(b"")
        try:
            yield
        finally:
            self.path.unlink()
            away.rename(self.path)


class TestGuardedObject(BehindAGuard, TestObject):
    pass


class TestShared(InPacks):
    host_local = False

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.path = tmp_path / "shared"
        self.path.mkdir(0o700)

    def make_spec(self) -> SharedSpec:
        return SharedSpec(path=self.path)


class TestEncryptedShared(Encrypted, TestShared):
    pass


class TestDisk(Tier):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.path = tmp_path / "disk"

    def make_spec(self) -> DiskSpec:
        capacity = self.payload_bytes * 192
        return DiskSpec.model_validate({"type": "disk", "path": self.path, "capacity": capacity})

    def medium(self, store: TierStore) -> Medium:
        return SlabMedium(self.path, self.name)


class TestDiskApart(StoredApart, TestDisk):
    pass


class TestEncryptedDisk(Encrypted, TestDisk):
    pass


class TestEncryptedRedis(Encrypted, TestRedis):
    keys = (b"k" * KEY_BYTES,)


class TestGuardedDisk(BehindAGuard, TestDisk):
    pass


class Blocks:
    """What a store in memory keeps, as its medium."""

    def __init__(self, blocks: dict[bytes, bytes]) -> None:
        self._blocks = blocks

    def read(self, key: bytes) -> bytes:
        return self._blocks[key]

    def write(self, key: bytes, data: bytes) -> None:
        self._blocks[key] = data


class Checked(MemoryStore):
    """Keeps a checksum of a block's key and payload before it; mutants look at less."""

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        for block in blocks:
            data = bytes(block.payload)
            self.blocks[block.key] = self._sum(block.key, data) + data
        return [True] * len(blocks)

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        return [self._take(block) for block in blocks]

    def _take(self, block: Block) -> bool:
        kept = self.blocks.get(block.key, b"")
        found, data = kept[:16], kept[16:]
        if not kept or not self._fits(block, found, data):
            return False
        block.payload[: len(data)] = data
        return True

    def _fits(self, block: Block, found: bytes, data: bytes) -> bool:
        return len(data) == len(block.payload) and found == self._sum(block.key, data)

    def _sum(self, key: bytes, data: bytes) -> bytes:
        return digest(key + data)


class ForgetsTheKey(Checked):
    """Another block's record is as good."""

    def _sum(self, key: bytes, data: bytes) -> bytes:
        return digest(data)


class LooksAtTheStart(Checked):
    def _sum(self, key: bytes, data: bytes) -> bytes:
        return digest(key + data[:1000])


class LooksHereAndThere(Checked):
    """At a part of each page: a flip in its start, middle and end is found."""

    def _sum(self, key: bytes, data: bytes) -> bytes:
        return digest(key + data[:4096] + data[30_000:34_000] + data[-4096:])


class AddsBytes(Checked):
    """Two bits that are flipped may leave a sum as it was."""

    def _sum(self, key: bytes, data: bytes) -> bytes:
        return digest(key + bytes([sum(data) % 256]))


class TakesWhatIsThere(Checked):
    """Reads what a file has, and checks the key alone."""

    def _fits(self, block: Block, found: bytes, data: bytes) -> bool:
        return found == self._sum(block.key, b"")

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        for block in blocks:
            self.blocks[block.key] = self._sum(block.key, b"") + bytes(block.payload)
        return [True] * len(blocks)


class KeepsTheCallersMemory(MemoryStore):
    def put(self, blocks: Sequence[Block]) -> list[bool]:
        self.blocks.update(blocks)  # type: ignore[arg-type]
        return [True] * len(blocks)


class Scribbles(MemoryStore):
    """Encrypts in place, say."""

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        for block in blocks:
            block.payload[0] ^= 1
        return super().put(blocks)


class ScribblesByAddress(MemoryStore):
    """As a library does that is handed an address."""

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        for block in blocks:
            ctypes.memset(address_of(block.payload), 0, 1)
        return super().put(blocks)


class ServesAnotherKey(MemoryStore):
    def get(self, blocks: Sequence[Block]) -> list[bool]:
        for block in blocks:
            block.payload[:] = self.blocks.get(block.key, next(iter(self.blocks.values())))
        return [True] * len(blocks)


class ForgetsToDrop(MemoryStore):
    def drop(self, keys: Sequence[bytes]) -> None:
        pass


class CutsKeys(MemoryStore):
    part = slice(32)

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        return super().put([Block(block.key[self.part], block.payload) for block in blocks])

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        return super().get([Block(block.key[self.part], block.payload) for block in blocks])


class CutsNamespaces(CutsKeys):
    part = slice(NAMESPACE_BYTES, None)


class AnswersWithAGenerator(MemoryStore):
    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return (key in self.blocks for key in keys)  # type: ignore[return-value]


class AnswersWithNumbers(MemoryStore):
    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return [int(key in self.blocks) for key in keys]  # type: ignore[misc]


class Bounded(MemoryStore):
    """Keeps 40 blocks; a mutant says what goes when there are more."""

    room = 40

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        super().put(blocks)
        while len(self.blocks) > self.room:
            self.blocks.pop(next(iter(self.blocks)))
        return [True] * len(blocks)

    def usage(self) -> Usage:
        size = sum(map(len, self.blocks.values()))
        return Usage(len(self.blocks), size, 40 * 65536)


class KeepsTooMuch(Bounded):
    room = 50


class TakesNothingWhenFull(Bounded):
    def put(self, blocks: Sequence[Block]) -> list[bool]:
        if len(self.blocks) + len(blocks) > self.room:
            return [False] * len(blocks)
        return MemoryStore.put(self, blocks)


class ForgetsWhatItHolds(Bounded):
    def usage(self) -> Usage:
        return Usage(40, 40 * 65536, 40 * 65536)


class HidesDamage(MemoryStore):
    def damaged(self) -> int:
        return 0


class LoadsOnAThread(MemoryStore):
    """Leaves a load in its queue if there is no thread for it."""

    def __init__(self) -> None:
        super().__init__()
        self.threads = ThreadPoolExecutor(1)

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        return self.threads.submit(super().get, blocks).result()


class PeeksLate(MemoryStore):
    """Has an index that is told of stores, and not of drops."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[bytes] = set()

    def peek(self, keys: Sequence[bytes]) -> list[bool]:
        self.known |= self.blocks.keys()
        return [key in self.known for key in keys]


class TouchInvents(MemoryStore):
    def touch(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.blocks.setdefault(key, b"")


class ClearsAll(MemoryStore):
    def clear(self, namespace: bytes) -> bool:
        self.blocks.clear()
        return False


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (AnswersWithAGenerator, "test_has_and_get_agree_on_a_mixed_batch"),
        (AnswersWithNumbers, "test_has_and_get_agree_on_a_mixed_batch"),
        (HidesDamage, "test_damage_is_counted"),
        (PeeksLate, "test_peek_agrees_with_has"),
        (TouchInvents, "test_touch_changes_no_block"),
        (ClearsAll, "test_clear_empties_one_namespace_and_no_other"),
        (Bounded, "test_what_put_says_is_held_is_held"),
        (KeepsTooMuch, "test_no_more_is_held_than_the_capacity"),
        (TakesNothingWhenFull, "test_what_put_says_is_held_is_held"),
        (ForgetsWhatItHolds, "test_what_is_dropped_gives_its_room_back"),
        (KeepsTheCallersMemory, "test_memory_is_the_callers_again_after_each_call"),
        (MemoryStore, "test_no_damage_is_served"),
        (ForgetsTheKey, "test_no_damage_is_served"),
        (LooksAtTheStart, "test_no_damage_is_served"),
        (LooksHereAndThere, "test_no_damage_is_served"),
        (AddsBytes, "test_no_damage_is_served"),
        (TakesWhatIsThere, "test_no_damage_is_served"),
        (Scribbles, "test_what_was_put_is_got"),
        (ScribblesByAddress, "test_what_was_put_is_got"),
        (LoadsOnAThread, "test_memory_is_left_alone_after_a_call_that_found_no_thread"),
        (ServesAnotherKey, "test_has_and_get_agree_on_a_mixed_batch"),
        (ForgetsToDrop, "test_what_is_dropped_is_gone_and_can_be_put_again"),
        (CutsKeys, "test_a_key_is_not_its_own_beginning"),
        (CutsNamespaces, "test_a_key_is_not_its_own_beginning"),
    ],
)
def test_the_kit_finds_a_broken_store(broken: type[MemoryStore], test: str) -> None:
    class Kit(StoreContract):
        verifies = True

        def open_store(self, payload_bytes: int) -> TierStore:
            return broken()

        def medium(self, store: TierStore) -> Medium:
            assert isinstance(store, MemoryStore)
            return Blocks(store.blocks)

    with pytest.raises((AssertionError, TierError, TypeError)):
        getattr(Kit(), test)()


class OfOnePlace(MemoryStore):
    """Open twice, it has the same blocks; a mutant remembers more of its own calls than is so."""

    def __init__(self, place: dict[bytes, bytes]) -> None:
        super().__init__()
        self.blocks = place
        self.mine: dict[bytes, bool] = {}


class RemembersMisses(OfOnePlace):
    def has(self, keys: Sequence[bytes]) -> list[bool]:
        self.mine |= {key: False for key in keys if key not in self.blocks}
        return [self.mine.get(key, True) for key in keys]


class RemembersHits(OfOnePlace):
    def has(self, keys: Sequence[bytes]) -> list[bool]:
        self.mine |= {key: True for key in keys if key in self.blocks}
        return [self.mine.get(key, False) for key in keys]


class EvictsItsOwn(OfOnePlace, Bounded):
    def put(self, blocks: Sequence[Block]) -> list[bool]:
        MemoryStore.put(self, blocks)
        self.mine |= {block.key: True for block in blocks}
        while len(self.mine) > self.room:
            self.blocks.pop(key := next(iter(self.mine)))
            self.mine.pop(key)
        return [block.key in self.mine for block in blocks]


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (RemembersMisses, "test_two_open_stores_see_each_other"),
        (RemembersHits, "test_two_open_stores_see_each_other"),
        (EvictsItsOwn, "test_no_more_is_held_than_the_capacity"),
    ],
)
def test_the_kit_finds_a_store_that_is_wrong_beside_another(
    broken: type[OfOnePlace], test: str
) -> None:
    class Kit(StoreContract):
        shared = True

        def __init__(self) -> None:
            self.place: dict[bytes, bytes] = {}

        def open_store(self, payload_bytes: int) -> TierStore:
            return broken(self.place)

    with pytest.raises(AssertionError):
        getattr(Kit(), test)()
    if broken is EvictsItsOwn:
        Kit.shared = False
        getattr(Kit(), test)()  # alone it is right


class ProcessPrivate(StoreContract):
    """A store that each process has for itself, which says that it is shared."""

    shared = True

    def __init__(self) -> None:
        self.store = MemoryStore()

    def open_store(self, payload_bytes: int) -> TierStore:
        return self.store

    def make_spec(self) -> StoreSpec:
        return GivenSpec(type="given")


def test_the_kit_finds_a_store_that_only_one_process_sees() -> None:
    kit = ProcessPrivate()
    kit.test_two_open_stores_see_each_other()
    with pytest.raises(AssertionError, match="must see the same blocks"):
        kit.test_another_process_sees_what_was_put()


def test_the_kit_finds_a_store_that_says_it_verifies() -> None:
    class Believes(ProcessPrivate):
        verifies = True

        def medium(self, store: TierStore) -> Medium:
            return Blocks(self.store.blocks)

    with pytest.raises(AssertionError, match="other bytes than were put"):
        Believes().test_a_damaged_block_is_a_miss_and_spoils_no_other()


def test_a_store_that_looks_at_all_is_let_through() -> None:
    store = Checked()

    class Checks(StoreContract):
        verifies = True

        def open_store(self, payload_bytes: int) -> TierStore:
            return store

        def medium(self, store: TierStore) -> Medium:
            assert isinstance(store, MemoryStore)
            return Blocks(store.blocks)

    Checks().test_no_damage_is_served()


@pytest.mark.parametrize(("spec", "kit"), [(True, False), (True, None), (False, True)])
def test_the_kit_compares_what_the_spec_and_the_class_say(spec: bool, kit: bool | None) -> None:
    class SaysSpec(GivenSpec):
        verifies: ClassVar[bool] = spec

    class Says(ProcessPrivate):
        verifies = kit

        def make_spec(self) -> StoreSpec:
            return SaysSpec(type="given")

    with pytest.raises(AssertionError, match=f"spec's verifies is {spec}"):
        Says().test_the_spec_says_whether_it_verifies()


@pytest.mark.parametrize("verb", ["put", "get"])
@pytest.mark.parametrize(
    ("deadline", "seconds", "over"),
    [
        ("10s", 9, 0),
        ("100ms", 9, 0),
        ("10s", 11, 10),
        ("100ms", 11, 10),
        ("30s", 11, 0),
        ("30s", 31, 30),
        (None, 11, 10),
    ],
)
def test_the_kit_finds_a_verb_that_takes_longer_than_its_deadline(
    verb: str, deadline: str | None, seconds: int, over: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(MemoryStore):
        def put(self, blocks: Sequence[Block]) -> list[bool]:
            clock.now += seconds if verb == "put" else 0
            return super().put(blocks)

        def get(self, blocks: Sequence[Block]) -> list[bool]:
            clock.now += seconds if verb == "get" else 0
            return super().get(blocks)

    class Kit(StoreContract):
        def open_store(self, payload_bytes: int) -> TierStore:
            return Slow()

        def make_spec(self) -> StoreSpec:
            if deadline is None:
                return super().make_spec()
            return GivenSpec.model_validate({"type": "given", "deadline": deadline})

    clock = Clock()
    monkeypatch.setattr("tiers.testing.harness.time", SimpleNamespace(monotonic=clock))
    late = pytest.raises(AssertionError, match=rf"{verb} took {seconds} s, .* after {over} s")
    with late if over else contextlib.nullcontext():
        Kit().test_what_was_put_is_got()


class Plain(StoreContract):
    def open_store(self, payload_bytes: int) -> TierStore:
        return MemoryStore()


def test_a_capability_that_a_store_has_not_is_skipped_by_name() -> None:
    tests = {"touch_changes_no_block": "Touch", "no_more_is_held_than_the_capacity": "Measured"}
    for test, name in tests.items():
        with pytest.raises(SkipTest, match=f"MemoryStore has no {name}"):
            getattr(Plain(), f"test_{test}")()


def test_a_store_that_a_test_fails_is_closed() -> None:
    class Closes(ClearsAll):
        def put(self, blocks: Sequence[Block]) -> list[bool]:
            return [False] * len(blocks)

        def close(self) -> None:
            closed.append(self)

    class Kit(StoreContract):
        def open_store(self, payload_bytes: int) -> TierStore:
            opened.append(Closes())
            return opened[-1]

    closed: list[Closes] = []
    opened: list[Closes] = []
    for test in (name for name in dir(Kit) if name.startswith("test_")):
        with contextlib.suppress(AssertionError, SkipTest):
            getattr(Kit(), test)()
    assert set(closed) == set(opened) and len(opened) > 15


def test_what_a_class_leaves_unset_is_skipped_by_name() -> None:
    for test in ("two_open_stores_see_each_other", "blocks_are_there_after_reopening"):
        with pytest.raises(SkipTest, match=r"StoreContract\.\w+ is None; a test class of yours"):
            getattr(StoreContract(), f"test_{test}")()
