"""Every store of ours, and the least a plugin's author writes, keeps the store contract."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal
from unittest import SkipTest

import pytest
import redis as redis_client

from spec.encryption import KEY_BYTES
from spec.offloading import StoreContext, StoreSpec
from tests.support.servers import RedisServer
from tiers.block import HEADER_BYTES
from tiers.disk.spec import DiskSpec
from tiers.errors import TierError
from tiers.remote.spec import RedisSpec
from tiers.store import Block, TierStore, Usage
from tiers.testing import StoreContract
from tiers.wrappers.encryption import Cipher, encrypted, sealed_bytes
from tiers.wrappers.guard import guard


class DictStore:
    """A whole store: what a plugin's author has to write at least."""

    def __init__(self, payload_bytes: int) -> None:
        self._payloads: dict[bytes, bytes] = {}

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self._payloads for key in keys]

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        self._payloads.update((block.key, bytes(block.payload)) for block in blocks)
        return [True] * len(blocks)

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        return [self._fill(block, self._payloads.get(block.key)) for block in blocks]

    def _fill(self, block: Block, payload: bytes | None) -> bool:
        if payload is not None:
            block.payload[:] = payload
        return payload is not None

    def drop(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._payloads.pop(key, None)

    def close(self) -> None:
        pass


class TestDict(StoreContract):
    shared = False
    persistent = False
    verifies = False

    def open_store(self, payload_bytes: int) -> TierStore:
        return DictStore(payload_bytes)


class TestRedis(StoreContract):
    shared = True
    persistent = True
    verifies = True
    codec: ClassVar[Literal["none", "zstd", "byteplanes"]] = "none"

    @pytest.fixture(autouse=True)
    def _place(self, shared_server: RedisServer) -> None:
        self.url = shared_server.url

    def make_spec(self) -> RedisSpec:
        return RedisSpec.model_validate(
            {"url": self.url, "ttl": "10m", "timeout": "30s", "codec": self.codec}
        )

    def open_store(self, payload_bytes: int) -> TierStore:
        return self.make_spec().open(StoreContext(payload_bytes=payload_bytes))

    def damage(self, keys: Sequence[bytes]) -> None:
        with redis_client.Redis.from_url(self.url) as client:
            for key in keys:
                name = b"kvtiers:" + self.name(key)
                client.setrange(name, HEADER_BYTES + 100, b"\xff\x00\xff")

    def name(self, key: bytes) -> bytes:
        return key


class TestRedisCompressed(TestRedis):
    test_another_process_sees_what_was_put = None  # as above

    codec = "zstd"


class TestRedisInPlanes(TestRedis):
    test_another_process_sees_what_was_put = None  # as above

    codec = "byteplanes"


class TestRedisOverUnixSocket(TestRedis):
    test_another_process_sees_what_was_put = None  # as above

    @pytest.fixture(autouse=True)
    def _place(self, shared_server: RedisServer) -> None:
        self.url = shared_server.unix_url


class TestGuardedRedis(TestRedis):
    test_another_process_sees_what_was_put = None  # as above

    def open_store(self, payload_bytes: int) -> TierStore:
        return guard(super().open_store(payload_bytes), "redis")


class TestDisk(StoreContract):
    shared = True
    persistent = True
    verifies = True

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.path = tmp_path / "disk"

    def make_spec(self) -> DiskSpec:
        capacity = self.payload_bytes * 192
        return DiskSpec.model_validate({"type": "disk", "path": self.path, "capacity": capacity})

    def open_store(self, payload_bytes: int) -> TierStore:
        return self.make_spec().open(StoreContext(payload_bytes=payload_bytes))

    def damage(self, keys: Sequence[bytes]) -> None:
        for slab in self.path.glob("slab-*"):
            with slab.open("r+b") as file:
                for place in range(8192, slab.stat().st_size, 4096):
                    file.seek(place)
                    file.write(b"\xff\x00\xff")


class TestEncryptedDisk(TestDisk):
    test_another_process_sees_what_was_put = None  # what is encrypted here has no spec

    def open_store(self, payload_bytes: int) -> TierStore:
        inner = self.make_spec().open(StoreContext(sealed_bytes(payload_bytes)))
        return encrypted(inner, [b"k" * KEY_BYTES, b"o" * KEY_BYTES], payload_bytes)


class TestEncryptedRedis(TestRedis):
    test_another_process_sees_what_was_put = None  # what is encrypted here has no spec

    def name(self, key: bytes) -> bytes:
        return Cipher(b"k" * KEY_BYTES).name(key)

    def open_store(self, payload_bytes: int) -> TierStore:
        inner = self.make_spec().open(StoreContext(sealed_bytes(payload_bytes)))
        return encrypted(inner, [b"k" * KEY_BYTES], payload_bytes)


class TestGuardedDisk(TestDisk):
    test_another_process_sees_what_was_put = None  # as above

    def open_store(self, payload_bytes: int) -> TierStore:
        return guard(super().open_store(payload_bytes), "disk")


class KeepsTheCallersMemory(DictStore):
    def put(self, blocks: Sequence[Block]) -> list[bool]:
        self._payloads.update(blocks)  # type: ignore[arg-type]
        return [True] * len(blocks)


class ServesAnotherKey(DictStore):
    def get(self, blocks: Sequence[Block]) -> list[bool]:
        anything = next(iter(self._payloads.values()), None)
        return [self._fill(b, self._payloads.get(b.key, anything)) for b in blocks]


class ForgetsToDrop(DictStore):
    def drop(self, keys: Sequence[bytes]) -> None:
        pass


class CutsKeys(DictStore):
    def put(self, blocks: Sequence[Block]) -> list[bool]:
        return super().put([Block(block.key[:32], block.payload) for block in blocks])

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        return super().get([Block(block.key[:32], block.payload) for block in blocks])


class AnswersWithAGenerator(DictStore):
    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return (key in self._payloads for key in keys)  # type: ignore[return-value]


class AnswersWithNumbers(DictStore):
    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return [int(key in self._payloads) for key in keys]  # type: ignore[misc]


class Bounded(DictStore):
    """Keeps 40 blocks; a mutant says what goes when there are more."""

    room = 40

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        super().put(blocks)
        while len(self._payloads) > self.room:
            self._payloads.pop(next(iter(self._payloads)))
        return [True] * len(blocks)

    def usage(self) -> Usage:
        size = sum(map(len, self._payloads.values()))
        return Usage(len(self._payloads), size, 40 * 65536)


class KeepsTooMuch(Bounded):
    room = 50


class TakesNothingWhenFull(Bounded):
    def put(self, blocks: Sequence[Block]) -> list[bool]:
        if len(self._payloads) + len(blocks) > self.room:
            return [False] * len(blocks)
        return DictStore.put(self, blocks)


class ForgetsWhatItHolds(Bounded):
    def usage(self) -> Usage:
        return Usage(40, 40 * 65536, 40 * 65536)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (AnswersWithAGenerator, "test_has_and_get_agree_on_a_mixed_batch"),
        (AnswersWithNumbers, "test_has_and_get_agree_on_a_mixed_batch"),
        (Bounded, "test_what_put_says_is_held_is_held"),
        (KeepsTooMuch, "test_what_put_says_is_held_is_held"),
        (TakesNothingWhenFull, "test_what_put_says_is_held_is_held"),
        (ForgetsWhatItHolds, "test_what_is_dropped_gives_its_room_back"),
        (KeepsTheCallersMemory, "test_the_callers_memory_is_not_kept"),
        (ServesAnotherKey, "test_has_and_get_agree_on_a_mixed_batch"),
        (ForgetsToDrop, "test_what_is_dropped_is_gone_and_can_be_put_again"),
        (CutsKeys, "test_a_key_is_not_its_own_beginning"),
    ],
)
def test_the_kit_finds_a_broken_store(broken: type[DictStore], test: str) -> None:
    kit = StoreContract()
    kit.open_store = broken  # type: ignore[method-assign]
    with pytest.raises((AssertionError, TierError)):
        getattr(kit, test)()


class DictSpec(StoreSpec):
    def open(self, site: StoreContext) -> TierStore:
        return DictStore(site.payload_bytes)


class ProcessPrivate(StoreContract):
    """A store that each process has for itself, which says that it is shared."""

    shared = True

    def __init__(self) -> None:
        self.store = DictStore(self.payload_bytes)

    def open_store(self, payload_bytes: int) -> TierStore:
        return self.store

    def make_spec(self) -> StoreSpec:
        return DictSpec(type="dict")


def test_the_kit_finds_a_store_that_only_one_process_sees() -> None:
    kit = ProcessPrivate()
    kit.test_two_open_stores_see_each_other()
    with pytest.raises(AssertionError, match="must see the same blocks"):
        kit.test_another_process_sees_what_was_put()


def test_the_kit_finds_a_store_that_says_it_verifies() -> None:
    class Believes(ProcessPrivate):
        verifies = True

        def damage(self, keys: Sequence[bytes]) -> None:
            for key in keys:
                self.store._payloads[key] = bytes(self.payload_bytes)

    with pytest.raises(AssertionError, match="other bytes than were put"):
        Believes().test_a_damaged_block_is_a_miss_and_spoils_no_other()


def test_what_a_class_leaves_unset_is_skipped_by_name() -> None:
    for test in ("two_open_stores_see_each_other", "blocks_are_there_after_reopening"):
        with pytest.raises(SkipTest, match=r"StoreContract\.\w+ is None; say which"):
            getattr(StoreContract(), f"test_{test}")()
