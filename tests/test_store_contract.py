"""Every store of ours, and the least a plugin's author writes, keeps the store contract."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from servers import RedisServer

from spec.encryption import KEY_BYTES
from spec.offloading import StoreSite
from tiers.disk.spec import DiskSpec
from tiers.remote.spec import RedisSpec
from tiers.store import Block, TierStore
from tiers.testing import StoreContract
from tiers.wrappers.encryption import encrypted, sealed_bytes
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
    def open_store(self, payload_bytes: int) -> TierStore:
        return DictStore(payload_bytes)


class TestRedis(StoreContract):
    shared = True
    persistent = True
    codec: ClassVar[Literal["none", "zstd", "planes"]] = "none"

    @pytest.fixture(autouse=True)
    def _place(self, shared_server: RedisServer) -> None:
        self.url = shared_server.url

    def open_store(self, payload_bytes: int) -> TierStore:
        spec = RedisSpec.model_validate(
            {"url": self.url, "ttl": "10m", "timeout": "30s", "codec": self.codec}
        )
        return spec.open(StoreSite(payload_bytes=payload_bytes))


class TestRedisCompressed(TestRedis):
    codec = "zstd"


class TestRedisInPlanes(TestRedis):
    codec = "planes"


class TestRedisOverUnixSocket(TestRedis):
    @pytest.fixture(autouse=True)
    def _place(self, shared_server: RedisServer) -> None:
        self.url = shared_server.unix_url


class TestGuardedRedis(TestRedis):
    def open_store(self, payload_bytes: int) -> TierStore:
        return guard(super().open_store(payload_bytes), "redis")


class TestDisk(StoreContract):
    persistent = True

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.path = tmp_path / "disk"

    def open_store(self, payload_bytes: int) -> TierStore:
        capacity = max(payload_bytes, self.payload_bytes) * 96
        spec = DiskSpec.model_validate({"type": "disk", "path": self.path, "capacity": capacity})
        return spec.open(StoreSite(payload_bytes=payload_bytes))


class TestEncryptedDisk(TestDisk):
    def open_store(self, payload_bytes: int) -> TierStore:
        inner = super().open_store(sealed_bytes(payload_bytes))
        return encrypted(inner, [b"k" * KEY_BYTES, b"o" * KEY_BYTES], payload_bytes)


class TestEncryptedRedis(TestRedis):
    def open_store(self, payload_bytes: int) -> TierStore:
        inner = super().open_store(sealed_bytes(payload_bytes))
        return encrypted(inner, [b"k" * KEY_BYTES], payload_bytes)


class TestGuardedDisk(TestDisk):
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


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (KeepsTheCallersMemory, "test_the_callers_memory_is_not_kept"),
        (ServesAnotherKey, "test_has_and_get_agree_on_a_mixed_batch"),
        (ForgetsToDrop, "test_what_is_dropped_is_gone_and_can_be_put_again"),
        (CutsKeys, "test_a_key_is_not_its_own_beginning"),
    ],
)
def test_the_kit_finds_a_broken_store(broken: type[DictStore], test: str) -> None:
    kit = StoreContract()
    kit.open_store = broken  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        getattr(kit, test)()
