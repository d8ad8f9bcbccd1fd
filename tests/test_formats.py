"""What is stored keeps its form: an upgrade finds it, and engines of two versions share it.

docs/upgrade.md promises that for as long as a format's number stays the same. Whoever changes what
is stored raises that number, and adds its digest here.
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import lmdb
import pytest
import xxhash

from spec.offloading import StoreContext
from tests.support.servers import RedisServer
from tiers.block import FORMAT_VERSION, KV_REVISION, namespace
from tiers.disk.folder import owner
from tiers.disk.folder.owner import Host
from tiers.disk.index.index import INDEX_FORMAT
from tiers.disk.spec import DiskSpec
from tiers.remote.packs.pack import PACK_VERSION, pack_index
from tiers.remote.packs.pack_store import PackStore
from tiers.remote.shared.directory_bucket import DirectoryBucket
from tiers.remote.spec import RedisSpec
from tiers.store import Block, TierStore
from tiers.wrappers.encryption import BlockCipher, encrypted_bytes, key_mark

PAYLOAD = 4096
SPACE = bytes.fromhex("0ae20f786aa45b3d5dd9b9e100f9adb3")
KEYS = [SPACE + bytes(range(number, number + 32)) for number in range(3)]
FORMS = {
    ("namespace", 1, 5): "c6373f85ac8aa0ef6817b829966b18d0",
    ("redis", 1): "eeb7d2e785312b4e87bef83ae14a06bb",
    ("disk's index", 3, 1): "30ae1ea5c68b8d33593fc3d0966ccee0",
    ("disk's owner", 3): "8d68ec3a81ef3cdb9b383c7bcfbad48e",
    ("disk's slab", 1): "a36fc5bc2b3d1585fd2d4f1dcca1a353",
    ("packs", 1, 1): "ab81c41c2d2ecff3fbc79fcab2df925e",
    ("encrypted", 1): "0f71de2dc70208b78889caa9c5918517",
}
"""Digests, by the numbers of the formats that decide them."""


def store_blocks(store: TierStore) -> None:
    with closing(store):
        payloads = [bytes(range(256)) * (PAYLOAD // 256 - 1) + bytes([n]) * 256 for n in range(3)]
        blocks = [Block(key, memoryview(one)) for key, one in zip(KEYS, payloads, strict=True)]
        assert store.put(blocks) == [True] * 3


def form(*parts: bytes | bytearray) -> str:
    whole = xxhash.xxh3_128()
    for part in parts:
        whole.update(b"%d " % len(part) + part)
    return whole.hexdigest()


def test_a_namespace() -> None:
    made = namespace({"model": "m", "weights": "w"}, rank=1, world_size=2)
    assert form(made) == FORMS["namespace", FORMAT_VERSION, KV_REVISION]


def test_what_redis_holds(shared_server: RedisServer) -> None:
    spec = RedisSpec.model_validate({"type": "redis", "url": shared_server.url})
    store_blocks(spec.open(StoreContext(PAYLOAD)))
    with shared_server.client() as client:
        names = sorted(name for name in client.keys("*") if SPACE in name)
        values = [client.get(name) for name in names]
    assert form(*names, *values) == FORMS["redis", FORMAT_VERSION]


def test_what_a_disks_folder_holds(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    spec = DiskSpec.model_validate({"type": "disk", "path": folder, "capacity": "1MiB"})
    store_blocks(spec.open(StoreContext(PAYLOAD)))
    file = str(folder / "index.mdb")
    with lmdb.open(file, subdir=False, max_dbs=20, readonly=True) as index, index.begin() as txn:
        rows = [
            part
            for table, _ in txn.cursor()
            for name, value in txn.cursor(index.open_db(table, txn))
            if name not in (b"times", b"setter")  # when it was, and who set the capacity
            for part in (table, name, value)
        ]
    assert form(*rows) == FORMS["disk's index", INDEX_FORMAT, FORMAT_VERSION]
    slab = (folder / "slab-8192.dat").read_bytes()
    assert form(slab) == FORMS["disk's slab", FORMAT_VERSION]


def test_who_has_a_disks_folder_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One version reads what another's process left that was killed. More words may follow."""
    lock, owners = tmp_path / "lock", tmp_path / "owners"
    number = lock.parent.stat().st_dev
    device = os.path.realpath(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    mounted = tmp_path / "sys" / "a-fs" / os.path.basename(device)
    for folder in (mounted, owners):
        folder.mkdir(parents=True)
    lock.touch()
    monkeypatch.setattr(owner, "_MOUNTED", tmp_path / "sys")
    monkeypatch.setattr(owner, "this_host", lambda: Host("b" * 36, "a" * 32, "node"))
    monkeypatch.setattr("os.getpid", lambda: 4711)
    monkeypatch.setattr("secrets.token_bytes", bytes)
    names = []
    for synced in (False, True):
        made = owner.Owner(owners, synced)
        names.append(made.file.name.encode())
        words = made.file.read_bytes().split(b" ")
        made.leave(clean=True)
        assert words[:2] == [b"%d" % place.stat().st_ino for place in (lock, mounted)]
    assert form(*names) == FORMS["disk's owner", INDEX_FORMAT]


def test_packs(tmp_path: Path) -> None:
    store_blocks(PackStore(DirectoryBucket(tmp_path), PAYLOAD, timeout=10, connections=1))
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    names = [str(file.relative_to(tmp_path)).encode() for file in files]
    found = form(*names, *(file.read_bytes() for file in files), pack_index(KEYS, PAYLOAD))
    assert found == FORMS["packs", PACK_VERSION, FORMAT_VERSION]


def test_what_encryption_makes_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_bytes", bytes)
    key, out = bytes(range(32)), bytearray(encrypted_bytes(PAYLOAD))
    cipher = BlockCipher(key)
    cipher.encrypt(Block(KEYS[0], memoryview(bytearray(PAYLOAD))), memoryview(out))
    names = cipher.names.space(SPACE), *cipher.names.of(KEYS)
    assert form(*names, out, key_mark(key).encode()) == FORMS["encrypted", FORMAT_VERSION]
