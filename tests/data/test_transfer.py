"""Archives move what a tier holds, bit for bit, however often they are interrupted."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import xxhash
import zstandard

from spec.fields import format_size
from spec.offloading import StoreContext
from tests.cli.conftest import Ran
from tests.cli.conftest import kvtiers as kvtiers  # the fixture
from tests.data.test_verification import PAYLOAD, chain_of, flip
from tests.disk import audit as disk
from tests.support.redis_verbs import get as get_from_redis
from tests.support.redis_verbs import opened as opened_redis
from tests.support.servers import RedisServer
from tiers import block
from tiers.block import Header
from tiers.data import archive, transfer
from tiers.data.archive import ArchiveError, ArchiveHead, ArchiveWriter
from tiers.disk.records import DiskRecords
from tiers.disk.slab import slot_bytes
from tiers.disk.spec import DiskSpec
from tiers.records import NamespaceNote
from tiers.testing import Memory, make_key
from tiers.wrappers.opening import open_guarded

KILLED = """
import os, signal, sys
import tiers.cli.main as m
import tiers.data.transfer, tiers.disk.disk_store, tiers.disk.records, tiers.wrappers.opening
sizes, left = [int(size) for size in sys.argv.pop(1).split(",")], 0
calls = {"pwrite": os.pwrite, "pwritev": os.pwritev}
def write(handle, data, offset, one=calls["pwrite"]):
    global left
    if len(data) > left:
        one(handle, data[:left], offset)
        os.kill(os.getpid(), signal.SIGKILL)
    left -= len(data)
    return one(handle, data, offset)
def writev(handle, parts, offset, many=calls["pwritev"]):
    global left
    left -= sum(map(len, parts))
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return many(handle, parts, offset)
os.pwrite, os.pwritev = write, writev
for left in sizes:
    process = os.fork()
    if not process:
        m.main()
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
"""
"""A command that is killed in the middle of a write, after so many bytes, once for each size."""


def killed_after(sizes: Sequence[int], *arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, ",".join(map(str, sizes)), *map(str, arguments)],
        env=disk.child_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def raw(folder: Path) -> dict[bytes, tuple[Header, bytes]]:
    """Every record of a disk tier, by its key."""
    records, found = DiskRecords(folder), dict[bytes, tuple[Header, bytes]]()

    def use(header: Header, stored: memoryview) -> None:
        found[header.key] = header, bytes(stored)

    for piece in records.listed():
        assert all(finding.state == "whole" for finding in records.read(piece, use))
    records.close()
    return found


def test_an_export_goes_on_wherever_it_was_cut(
    tmp_path: Path, kvtiers: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or lost what the device had not yet; and a tier may list a record twice, as a Redis does."""
    chance, archive = random.Random(6), tmp_path / "warm.kvt"
    part, chain = tmp_path / "warm.kvt.part", chain_of(tmp_path / "kv")
    with disk.opened(tmp_path / "kv", slots=100) as store:
        assert all(disk.put(store, disk.keys(*range(40)), PAYLOAD))
    assert kvtiers("export", chain, archive).status == 0
    assert archive.stat().st_mode & 0o077 == 0, "what engines were asked is nobody else's"
    whole = archive.read_bytes()
    for cut in (1, 17, 40, len(whole) - 1, len(whole), *chance.sample(range(len(whole)), 2)):
        archive.unlink()
        part.write_bytes(whole[:cut])
        assert kvtiers("export", chain, archive).status == 0
        assert archive.read_bytes() == whole and not part.exists(), cut
    archive.unlink()
    part.write_bytes(whole[:-3000] + bytes(2000) + whole[-1000:-40])
    assert kvtiers("export", chain, archive).status == 0 and archive.read_bytes() == whole
    listed = DiskRecords.listed
    monkeypatch.setattr(DiskRecords, "listed", lambda records: [*listed(records)] * 2)
    archive.unlink()
    with closing(ArchiveWriter(archive, ArchiveHead())):
        beside = kvtiers("export", chain, archive)
        assert beside.status == 1 and "another process writes it" in beside.err
    assert "warm.kvt: 40 blocks, " in kvtiers("export", chain, archive).out
    assert len(archive.read_bytes()) == len(whole)


@pytest.mark.faults
@pytest.mark.fault
def test_an_export_killed_at_ten_points_imports_bit_for_bit(
    tmp_path: Path, kvtiers: Callable[..., Ran]
) -> None:
    """And so does an import that is killed three times."""
    chance, archive = random.Random(5), tmp_path / "warm.kvt"
    chain, other = chain_of(tmp_path / "kv"), chain_of(tmp_path / "other")
    with disk.opened(tmp_path / "kv", slots=100) as store:
        assert all(disk.put(store, disk.keys(*range(60))))
        assert all(disk.put(store, disk.keys(*range(60, 90)), PAYLOAD))
    every = raw(tmp_path / "kv")
    assert kvtiers("export", chain, tmp_path / "undisturbed.kvt").status == 0
    part = (tmp_path / "undisturbed.kvt").stat().st_size // 10
    killed_after([chance.randrange(1, part) for _ in range(10)], "export", chain, archive)
    assert not archive.exists()
    assert kvtiers("export", chain, archive).status == 0
    # In its first put of 60 blocks, in its second one of 30, and in what is left of that.
    sizes = [40 * disk.SLOT, 60 * disk.SLOT + 20_000, 30_000]
    killed_after(sizes, "import", other, archive)
    ran = kvtiers("import", other, archive)
    assert ran.status == 0 and "there already" in ran.out
    assert raw(tmp_path / "other") == every
    ran = kvtiers("export", chain, archive)
    assert ran.status == 1 and "whole already, 90 blocks" in ran.err


@pytest.mark.parametrize(
    ("at_once", "status", "moved", "says"),
    [(64, 1, 4, "4 without room"), (2, 0, 8, "4 evicted to make room")],
)
def test_what_was_used_last_is_there_after_an_import_into_less_room(
    tmp_path: Path,
    kvtiers: Callable[..., Ran],
    monkeypatch: pytest.MonkeyPatch,
    at_once: int,
    status: int,
    moved: int,
    says: str,
) -> None:
    """Whether one put has more than there is room for, or later ones evict what earlier ones had
    stored: the command says so."""
    monkeypatch.setattr(transfer, "batch_blocks", lambda size: at_once)
    archive, other = tmp_path / "warm.kvt", chain_of(tmp_path / "other")
    with disk.opened(tmp_path / "kv", slots=8) as store:
        disk.put(store, disk.keys(*range(8)))
        for number in chosen(8):
            assert disk.get(store, disk.keys(number)) == [True]
    assert kvtiers("export", chain_of(tmp_path / "kv"), archive).status == 0
    other.write_text(other.read_text().replace("64MiB", f"{4 * disk.SLOT}B"))
    ran = kvtiers("import", other, archive)
    size = format_size(moved * disk.PAYLOAD)
    assert (ran.status, ran.out) == (status, f"disk: {moved} blocks, {size}, {says}\n")
    with disk.opened(tmp_path / "other", slots=4) as store:
        held = store.has(disk.keys(*chosen(8)))
    assert held == [False] * 4 + [True] * 4, ran


def chosen(count: int) -> list[int]:
    return random.Random(2).sample(range(count), count)


def test_a_disk_s_blocks_serve_from_redis_and_back(
    tmp_path: Path, shared_server: RedisServer, kvtiers: Callable[..., Ran]
) -> None:
    keys = [make_key() for _ in range(20)]
    with disk.opened(tmp_path / "kv", slots=40) as store:
        assert all(disk.put(store, keys))
    redis, other = tmp_path / "redis.yaml", chain_of(tmp_path / "other")
    settings = f"url: '{shared_server.url}', key_prefix: moved, codec: zstd"
    redis.write_text(f"version: 1\ntiers: [{{type: redis, {settings}}}]\n")
    assert kvtiers("export", chain_of(tmp_path / "kv"), tmp_path / "a.kvt").status == 0
    assert kvtiers("import", redis, tmp_path / "a.kvt").status == 0
    with opened_redis(shared_server.url, disk.PAYLOAD, key_prefix="moved", codec="zstd") as remote:
        assert get_from_redis(remote, *keys, payload_bytes=disk.PAYLOAD) == [True] * 20
    assert kvtiers("export", redis, tmp_path / "b.kvt").status == 0
    assert kvtiers("import", other, tmp_path / "b.kvt").status == 0
    assert raw(tmp_path / "other") == raw(tmp_path / "kv")


@pytest.mark.fault
def test_damage_is_left_out_and_a_damaged_archive_imports_nothing_wrong(
    tmp_path: Path, kvtiers: Callable[..., Ran]
) -> None:
    chance, archive = random.Random(9), tmp_path / "warm.kvt"
    chain = chain_of(tmp_path / "kv")
    with disk.opened(tmp_path / "kv", slots=100) as store:
        assert all(disk.put(store, disk.keys(*range(50)), PAYLOAD))
        flip(tmp_path / "kv", [3, 4], chance)
    ran = kvtiers("export", chain, archive)
    size = format_size(48 * slot_bytes(PAYLOAD))
    assert ran.status == 1 and f": 48 blocks, {size}, 2 damaged and left out" in ran.out
    whole = archive.read_bytes()
    for attempt in range(4):
        other = tmp_path / f"other{attempt}"
        place = chance.randrange(len(whole))
        byte = whole[place] ^ 1 << chance.randrange(8)
        archive.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
        ran = kvtiers("import", chain_of(other), archive)
        assert ran.status == 1, place
        if disk.slab_path(other, PAYLOAD).exists():
            with disk.opened(other) as store:
                disk.get(store, disk.keys(*range(50)), PAYLOAD)  # which checks each hit
    # Cut in its end; with another digest of its headers there; and with frames of another kind.
    for name, blocks, spoiled in (
        ("cut", 48, whole[:-5]),
        ("other", 48, whole[:-8] + bytes(8)),
        ("kind", 0, whole.replace(b"KVR\n", b"KVX\n")),
    ):
        archive.write_bytes(spoiled)
        ran = kvtiers("import", chain_of(tmp_path / name), archive)
        assert ran.status == 1 and f"{blocks} blocks" in ran.out and "export again" in ran.err
        ran = kvtiers("export", chain, archive)
        assert ran.status == 1 and "not a whole archive" in ran.err
        assert archive.read_bytes() == spoiled


def test_encrypted_blocks_stay_encrypted_and_go_where_their_key_is(
    tmp_path: Path, kvtiers: Callable[..., Ran]
) -> None:
    archive, key = tmp_path / "warm.kvt", make_key()

    def encrypted(name: str, digits: str) -> Path:
        keys = tmp_path / f"key{digits}"
        keys.write_text("\n".join(digit * 64 for digit in digits))
        keys.chmod(0o600)
        chain = chain_of(tmp_path / name)
        text = chain.read_text().replace("}]", f", encryption: {{key_file: {keys}}}}}]")
        chain.write_text(text)
        return chain

    def opened(name: str) -> DiskSpec:
        settings = {"path": tmp_path / name, "capacity": "64MiB"}
        return DiskSpec.model_validate({**settings, "encryption": {"key_file": tmp_path / "key1"}})

    chain = encrypted("kv", "1")
    store = open_guarded(opened("kv"), StoreContext(PAYLOAD))
    assert store.put(Memory([key], PAYLOAD).fill().blocks) == [True]
    store.close()
    with disk.opened(tmp_path / "kv") as before:
        disk.put(before, [plain := make_key()], PAYLOAD)
    records = DiskRecords(tmp_path / "kv")
    note = NamespaceNote("a model", "0.32.0", "5f2c", 16, PAYLOAD, 0, 1, False, True, 0.0, 1)
    records.note(plain[:16], note.encode())
    records.close()
    ran = kvtiers("export", chain, archive)
    assert ran.status == 0 and ": 1 blocks" in ran.out and "1 not encrypted and left" in ran.out
    assert plain[:16] not in (written := archive.read_bytes())
    assert b"a model" not in written
    begun = tmp_path / "begun.kvt.part"
    begun.write_bytes(archive.read_bytes()[:-5])
    ran = kvtiers("export", encrypted("kv", "2"), tmp_path / "begun.kvt")
    assert ran.status == 1 and "begun from a tier with other encryption keys" in ran.err
    assert begun.read_bytes() == archive.read_bytes()[:-5]
    for other, says in (
        (chain_of(tmp_path / "plain"), "tier 'disk' has no encryption"),
        (encrypted("other", "2"), "encrypted with keys that are not in"),
    ):
        ran = kvtiers("import", other, archive)
        assert ran.status == 2 and says in ran.err
    assert kvtiers("export", encrypted("kv", "13"), tmp_path / "both.kvt").status == 0
    ran = kvtiers("import", encrypted("third", "1"), tmp_path / "both.kvt")
    assert ran.status == 2, "some of its blocks may be encrypted with the other key"
    with disk.opened(tmp_path / "bare") as bare:
        disk.put(bare, disk.keys(1))
    assert kvtiers("export", chain_of(tmp_path / "bare"), tmp_path / "bare.kvt").status == 0
    ran = kvtiers("import", encrypted("third", "1"), tmp_path / "bare.kvt")
    assert ran.status == 2 and "not encrypted, and tier 'disk' has encryption" in ran.err
    assert kvtiers("import", encrypted("third", "1"), archive).status == 0
    store = open_guarded(opened("third"), StoreContext(PAYLOAD))
    memory = Memory([key], PAYLOAD)
    assert store.get(memory.blocks) == [True] and memory.holds(0)
    store.close()


def lying(head: bytes, *records: tuple[bytes, bytes, bool]) -> bytes:
    """A whole archive of this head, and of headers, stored bytes and whether those are packed;
    every checksum in it is right."""
    front = archive._MAGIC + archive._LENGTH.pack(archive.FORMAT_VERSION, len(head)) + head
    parts = [front, archive._CHECKSUM.pack(xxhash.xxh3_64_intdigest(front))]
    for header, data, packed in records:
        sum_ = archive._frame_sum(packed, len(data), header)
        parts += [archive._FRAME.pack(archive._RECORD, packed, len(data), sum_), header, data]
    digest = xxhash.xxh3_64(b"".join(header for header, _, _ in records)).intdigest()
    return b"".join([*parts, archive._FRAME.pack(archive._END, 0, len(records), digest)])


HEAD = b'{"keys": [], "notes": {}}'
SPACE = "6e" * 16
_packing = zstandard.ZstdCompressor().compressobj(size=1 << 40)
A_TIB = _packing.compress(b"x") + _packing.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
"""Packed bytes that say that they unpack to a TiB."""


@pytest.mark.parametrize(
    "head",
    [
        b"[1]",
        b"{}}",
        b"\xff",
        b"[" * 100_000,
        b'{"keys": 5, "notes": {}}',
        b'{"keys": [], "notes": {"../../x": "y"}}',
        b'{"keys": [], "notes": {"' + b"ab" * 400 + b'": "y"}}',
        b'{"keys": [], "notes": {"' + SPACE.encode() + b'": 5}}',
        b'{"keys": [], "notes": {"' + SPACE.encode() + b'": "' + b"y" * 9000 + b'"}}',
    ],
)
def test_a_head_that_lies_is_named(
    tmp_path: Path, kvtiers: Callable[..., Ran], head: bytes
) -> None:
    (tmp_path / "lies.kvt").write_bytes(lying(head))
    ran = kvtiers("import", chain_of(tmp_path / "kv"), tmp_path / "lies.kvt")
    assert ran.status == 1 and ran.err.endswith("the head of this archive is none of kvtiers\n")


@pytest.mark.parametrize(
    ("key", "payload", "stored", "packed"),
    [
        (b"short", 4096, 4096, False),
        (b"k" * 32, 1 << 40, 4096, False),
        (b"k" * 32, 4096, 1 << 62, True),
        (b"k" * 32, 4096, 2048, False),
        (b"k" * 32, 2048, 4096, False),
        (b"k" * 32, 0, 0, False),
        (b"k" * 32, 4096, 4096, b"no zstd"),
        (b"k" * 32, 4096, 4096, A_TIB),
    ],
)
def test_a_record_that_lies_is_left_out(
    tmp_path: Path,
    kvtiers: Callable[..., Ran],
    key: bytes,
    payload: int,
    stored: int,
    packed: bool | bytes,
) -> None:
    """`packed`: the bytes of it, or whether zstd packs those that the header is of."""
    chain, data = chain_of(tmp_path / "kv"), bytes(min(stored, 4096))
    liar = block.Header(b"n" * 16 + key, 0, payload, stored, block.digest(data)).pack()
    if key == b"short":
        liar = block.Header(b"n" * 16, 0, payload, stored, block.digest(data)).pack()
    if packed:
        data = packed if isinstance(packed, bytes) else zstandard.ZstdCompressor().compress(data)
    (tmp_path / "lies.kvt").write_bytes(lying(HEAD, (liar, data, bool(packed))))
    ran = kvtiers("import", chain, tmp_path / "lies.kvt")
    assert ran.status == 1 and "0 blocks" in ran.out, ran.err
    assert "1 damaged and left out" in ran.out or "is damaged at byte" in ran.err


@pytest.mark.parametrize("length", [1 << 62, 8192])
def test_a_record_that_is_longer_than_the_archive_or_its_block_is_where_it_ends(
    tmp_path: Path, kvtiers: Callable[..., Ran], length: int
) -> None:
    """Whoever wrote its length does not choose how much memory reading it takes."""
    header = block.Header(b"n" * 48, 0, 4096, 4096, bytes(16)).pack()
    sum_ = archive._frame_sum(False, length, header)
    frame = archive._FRAME.pack(archive._RECORD, False, length, sum_) + header + bytes(8192)
    (tmp_path / "lies.kvt").write_bytes(lying(HEAD)[: -archive._FRAME.size] + frame)
    ran = kvtiers("import", chain_of(tmp_path / "kv"), tmp_path / "lies.kvt")
    assert ran.status == 1 and "0 blocks" in ran.out and "is damaged at byte" in ran.err
    assert "left out" not in ran.out, "it was read"


def test_a_note_of_an_archive_replaces_none_and_moves_no_cursor(
    tmp_path: Path, kvtiers: Callable[..., Ran]
) -> None:
    note = NamespaceNote("\x1b[31mm\n", "e", "l", 1, 1, 0, 1, False, False, 0.0, 1)
    evil = note.encode().decode()
    head = json.dumps({"keys": [], "notes": {SPACE: evil, "ab" * 16: "no note"}}).encode()
    (tmp_path / "lies.kvt").write_bytes(lying(head))
    chain, key = chain_of(tmp_path / "kv"), b"n" * 16 + b"k" * 32
    with disk.opened(tmp_path / "kv") as store:
        disk.put(store, [key])
    assert kvtiers("import", chain, tmp_path / "lies.kvt").status == 0
    shown = kvtiers("inspect", chain).out
    assert "\x1b" not in shown and r"\x1b[31mm\n, vLLM e" in shown
    assert list(DiskRecords(tmp_path / "kv").notes()) == [b"n" * 16]
    other = evil.replace("vLLM", "x").replace('"e"', '"f"')
    (tmp_path / "again.kvt").write_bytes(lying(json.dumps({"notes": {SPACE: other}}).encode()))
    assert kvtiers("import", chain, tmp_path / "again.kvt").status == 0
    assert kvtiers("inspect", chain).out.count("vLLM e") == 1


def test_an_archive_is_a_file(tmp_path: Path, kvtiers: Callable[..., Ran]) -> None:
    for command, place, says in (
        ("export", "-", "an archive is a file"),
        ("import", "-", "an archive is a file"),
        ("export", tmp_path / "none" / "a.kvt", "its folder is not there"),
        ("import", tmp_path / "a.kvt", "found no such file; kvtiers export writes it"),
    ):
        ran = kvtiers(command, chain_of(tmp_path / "kv"), place)
        assert ran.status == 2 and says in ran.err, ran


def test_an_archive_is_not_taken_for_what_the_tier_holds_now(
    tmp_path: Path, kvtiers: Callable[..., Ran]
) -> None:
    """A nightly export onto last night's file ended with 0."""
    chain, archive = chain_of(tmp_path / "kv"), tmp_path / "warm.kvt"
    with disk.opened(tmp_path / "kv") as store:
        disk.put(store, disk.keys(1))
        assert kvtiers("export", chain, archive).status == 0
        before = archive.read_bytes()
        disk.put(store, disk.keys(2))
    ran = kvtiers("export", chain, archive)
    assert (ran.status, ran.out) == (1, "") and "whole already, 1 blocks; remove it" in ran.err
    assert archive.read_bytes() == before


def test_files_of_others_stay(
    tmp_path: Path, kvtiers: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk.opened(tmp_path / "kv") as store:
        disk.put(store, disk.keys(1))
    for name in ("a.kvt", "a.kvt.part"):
        (tmp_path / name).write_text("a letter to somebody")
        ran = kvtiers("export", chain_of(tmp_path / "kv"), tmp_path / "a.kvt")
        assert ran.status == 1 and "no archive of kvtiers" in ran.err
        assert (tmp_path / name).read_text() == "a letter to somebody"
        (tmp_path / name).unlink()
    ArchiveWriter(tmp_path / "b.kvt", ArchiveHead()).close()
    begun, us = tmp_path / "b.kvt.part", os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: us + 1)
        for before in (begun.read_bytes(), b""):
            begun.write_bytes(before)
            with pytest.raises(ArchiveError, match="it is user"):
                ArchiveWriter(tmp_path / "b.kvt", ArchiveHead())
            assert begun.read_bytes() == before
    begun.chmod(0o644)
    ArchiveWriter(tmp_path / "b.kvt", ArchiveHead()).close()
    assert begun.stat().st_mode & 0o777 == 0o600
    (tmp_path / "a.kvt.part").symlink_to(tmp_path / "of somebody")
    with pytest.raises(OSError, match="symbolic link"):
        ArchiveWriter(tmp_path / "a.kvt", ArchiveHead())
