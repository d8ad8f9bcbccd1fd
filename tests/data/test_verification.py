"""What verify finds and scrub drops, on real tiers with running stores beside them."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from spec.fields import format_size
from tests.cli.conftest import Ran
from tests.cli.conftest import kvtiers as kvtiers  # the fixture
from tests.disk import audit as disk
from tests.support.damage import keys_on
from tiers.data import verification
from tiers.disk.folder.open_folder import OpenFolder
from tiers.disk.index.edit import index_key
from tiers.disk.records import DiskRecords
from tiers.disk.slab import PAGE, Slab, slot_bytes
from tiers.disk.spec import DiskSpec
from tiers.errors import TierUnavailable
from tiers.records import StoredRecord
from tiers.testing import Memory

PAYLOAD = 4096
COMMAND = "import tiers.cli.main as m; m.main()"


def chain_of(folder: Path) -> Path:
    """A chain of cpu, and a disk tier in a folder."""
    file = folder.with_suffix(".yaml")
    tiers = f"[{{type: cpu, capacity: 1GiB}}, {{type: disk, capacity: 64MiB, path: {folder}}}]"
    file.write_text(f"version: 1\ntiers: {tiers}\n")
    return file


def beside(*arguments: object) -> tuple[int, dict[str, dict[str, object]]]:
    """Run a command as another process; its status and its JSON."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *map(str, arguments), "--json"],
        env=disk.child_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def flip(folder: Path, slots: Sequence[int], chance: random.Random) -> set[bytes]:
    """Flip a bit of the record in each of these slots; return the keys of their blocks."""
    keys = keys_on(folder)
    with disk.slab_path(folder, PAYLOAD).open("r+b") as slab:
        for slot in slots:
            # In the first 248 bytes is all that a header says.
            place = chance.choice((chance.randrange(248), PAGE + chance.randrange(PAYLOAD)))
            slab.seek(slot * slot_bytes(PAYLOAD) + place)
            (byte,) = slab.read(1)
            slab.seek(-1, 1)
            slab.write(bytes([byte ^ 1 << chance.randrange(8)]))
        slab.flush()
        os.fsync(slab.fileno())
    return {keys[slot] for slot in slots}


@pytest.mark.fault
def test_hundreds_of_flipped_records_are_found_and_no_other_is_dropped(tmp_path: Path) -> None:
    folder, chance = tmp_path / "kv", random.Random(7)
    chain = chain_of(folder)
    with disk.opened(folder, slots=400) as store:
        every = disk.keys(*range(400))
        assert all(disk.put(store, every, PAYLOAD))
        flipped = flip(folder, chance.sample(range(400), 300), chance)
        status, found = beside("verify", chain)
        names = {name for name, _ in found["disk"]["found"]}  # type: ignore[attr-defined]
        assert status == 1
        assert names == {index_key(key).hex() for key in flipped}
        status, found = beside("scrub", chain)
        assert (status, found["disk"]["dropped"]) == (0, 300)
        assert store.has(every) == [key not in flipped for key in every]
        assert beside("verify", chain)[0] == 0
        disk.audit(store)


def test_a_bad_disk_does_not_fill_the_screen(tmp_path: Path, kvtiers: Callable[..., Ran]) -> None:
    folder, chance = tmp_path / "kv", random.Random(7)
    with disk.opened(folder, slots=40) as store:
        assert all(disk.put(store, disk.keys(*range(40)), PAYLOAD))
        flip(folder, range(30), chance)
    ran = kvtiers("verify", chain_of(folder))
    *named, more, last = ran.out.splitlines()
    assert (ran.status, len(named)) == (1, 20) and all(": damaged: " in line for line in named)
    assert more == "disk: 10 more are damaged; --json names 30 of them"
    assert last.startswith("disk: 40 blocks, ") and last.endswith(": 30 damaged")


@pytest.mark.parametrize("found", ["another key", "is another", "payload of", "unreadable"])
def test_a_record_that_is_not_the_index_s_is_damaged_however_whole(
    tmp_path: Path, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk.opened(tmp_path) as store:
        assert disk.put(store, disk.keys(1 if found == "another key" else 0), PAYLOAD) == [True]
        if found != "unreadable":
            other = disk.slab_path(tmp_path, PAYLOAD).read_bytes()
            store.drop(disk.keys(0, 1))
            length = PAYLOAD - 9 if found == "payload of" else PAYLOAD
            memory = Memory(disk.keys(0), length).fill(version=found == "is another")
            assert store.put(memory.blocks) == [True]
            disk.slab_path(tmp_path, PAYLOAD).write_bytes(other)
        records, used = DiskRecords(tmp_path), list[object]()
        listed = next(records.listed())
        if found == "unreadable":

            def read(*of: object) -> None:
                raise OSError(errors.pop(0), "of the device")

            errors = [errno.EIO, errno.ENOMEM]
            monkeypatch.setattr(Slab, "read", read)
        (finding,) = records.read(listed, lambda *of: used.append(of))
        assert finding.state == "damaged" and found in finding.why and not used
        if found == "unreadable":
            with pytest.raises(TierUnavailable):  # which says nothing of the block
                records.read(listed)
        else:
            assert records.drop_damaged(listed) == 1
        records.close()


def test_a_block_that_is_stored_anew_before_it_is_dropped_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same slot, with the same checksum: the stamp of its entry alone is another."""
    chance = random.Random(1)
    with disk.opened(tmp_path) as store:
        assert disk.put(store, disk.keys(1), PAYLOAD) == [True]
        flip(tmp_path, [0], chance)
        records = DiskRecords(tmp_path)
        (record,) = next(records.listed())
        honest, calls = OpenFolder.drop, []

        def drop(self: OpenFolder, *of: object) -> int:
            calls.append(of)
            if len(calls) == 1:
                store.drop(disk.keys(1))
                assert disk.put(store, disk.keys(1), PAYLOAD) == [True]
            return honest(self, *of)  # type: ignore[arg-type]

        monkeypatch.setattr(OpenFolder, "drop", drop)
        assert records.drop_damaged([record]) == 0
        assert disk.get(store, disk.keys(1), PAYLOAD) == [True]
        records.close()


def test_looking_changes_nothing(tmp_path: Path, kvtiers: Callable[..., Ran]) -> None:
    """Neither the capacity, which the chain has smaller, nor which block is evicted next."""
    folder = tmp_path / "kv"
    with disk.opened(folder, slots=4) as store:
        disk.put(store, disk.keys(0, 1, 2, 3))
    chain = chain_of(folder)
    chain.write_text(chain.read_text().replace("64MiB", "128KiB"))
    for command in ("inspect", "verify", "scrub"):
        assert kvtiers(command, chain).status == 0
    with disk.opened(folder, slots=4) as store:
        disk.put(store, disk.keys(4))
        assert store.has(disk.keys(0, 1, 2, 3, 4)) == [True] * 3 + [False, True]


@pytest.mark.parametrize(
    ("others", "rate", "bound"),
    [
        (True, None, 200e6),
        (None, None, 200e6),
        (False, None, None),
        (True, "all", None),
        (False, "1MB/s", 1e6),
    ],
)
def test_reading_leaves_engines_their_disk(
    tmp_path: Path,
    kvtiers: Callable[..., Ran],
    monkeypatch: pytest.MonkeyPatch,
    others: bool | None,
    rate: str | None,
    bound: float | None,
) -> None:
    """And counts as evicted what was dropped after it was listed."""
    bounds, taken = list[object](), list[int]()

    def limit(rate: float | None) -> object:
        bounds.append(rate)
        return SimpleNamespace(take=taken.append)

    def listed(records: DiskRecords) -> Iterator[Sequence[StoredRecord]]:
        for piece in honest(records):
            records.drop(piece[:1])
            yield piece

    honest = DiskRecords.listed
    monkeypatch.setattr(DiskRecords, "listed", listed)
    monkeypatch.setattr(DiskRecords, "others", lambda records: others)
    monkeypatch.setattr(verification, "RateLimit", limit)
    with disk.opened(tmp_path / "kv") as store:
        disk.put(store, disk.keys(*range(5)), PAYLOAD)
    options = () if rate is None else ("--rate", rate)
    ran = kvtiers("verify", chain_of(tmp_path / "kv"), *options)
    assert ran.status == 0 and "disk: 4 blocks, " in ran.out and "1 evicted meanwhile" in ran.out
    ran = kvtiers("export", chain_of(tmp_path / "kv"), tmp_path / "a.kvt", *options)
    size = format_size(3 * slot_bytes(PAYLOAD))
    assert ran.status == 0 and ran.out.endswith(f": 3 blocks, {size}, 1 evicted meanwhile\n")
    slots = [5, 4] if rate != "1MB/s" else [1] * 9  # one block takes longer there than a batch may
    assert bounds == [bound] * 2 and taken == [one * slot_bytes(PAYLOAD) for one in slots]


def test_a_folder_that_an_engine_would_empty_is_refused_and_stays(
    tmp_path: Path, kvtiers: Callable[..., Ran]
) -> None:
    folder = tmp_path / "kv"
    chain = chain_of(folder)
    missing = kvtiers("inspect", chain)
    assert missing.err.startswith(f"disk: {folder}: "), "a class of ours says nothing more"
    assert (missing.status, folder.exists()) == (1, False)
    assert "nothing is stored" in missing.err
    with disk.opened(folder) as store:
        disk.put(store, disk.keys(0))
    with (folder / "index.mdb").open("r+b") as index:
        index.seek(9000)
        index.write(b"\1")
    before = disk.slab_path(folder).read_bytes()
    for command in ("inspect", "verify", "scrub"):
        ran = kvtiers(command, chain)
        assert ran.status == 1 and "the next engine that opens it empties it" in ran.err
    assert disk.slab_path(folder).read_bytes() == before


@pytest.mark.parametrize(
    ("path", "why"),
    [("none", "nothing is stored"), ("x" * 256, "too long"), ("unlisted", "can't list what")],
)
def test_a_tier_that_can_not_be_read_keeps_no_other_from_its_turn(
    tmp_path: Path,
    kvtiers: Callable[..., Ran],
    path: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def records(spec: DiskSpec) -> DiskRecords | None:  # as of a plugin's
        return None if spec.path.name == "unlisted" else DiskRecords(spec.path)

    monkeypatch.setattr(DiskSpec, "records", records)
    with disk.opened(tmp_path / "kv") as store:
        disk.put(store, disk.keys(0))
    chain = tmp_path / "two.yaml"
    chain.write_text(
        "version: 1\ntiers:\n"
        f"  - {{type: disk, name: new, path: {tmp_path}/{path}, capacity: 1MiB}}\n"
        f"  - {{type: disk, name: old, path: {tmp_path}/kv, capacity: 1MiB}}\n"
    )
    for command in ("inspect", "verify", "gc"):
        ran = kvtiers(command, chain)
        assert ran.status == 1 and "new: " in ran.err and why in ran.err
        assert "old: " in ran.out
    ran = kvtiers("export", chain, tmp_path / "a.kvt")
    assert ran.status == 2 and "name a tier by --tier: " in ran.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tier", "cpu"], "--tier cpu: its type can't list what it holds; use disk"),
        (["--tier", "dsik"], "--tier dsik: no such tier; use disk"),
        (["--rate", "200"], "--rate 200: write a size per s, m, h or day"),
    ],
)
def test_bad_arguments_are_named(
    tmp_path: Path, kvtiers: Callable[..., Ran], arguments: list[str], says: str
) -> None:
    ran = kvtiers("verify", chain_of(tmp_path / "kv"), *arguments)
    assert ran.status == 2 and says in ran.err
