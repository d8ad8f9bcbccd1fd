"""The records of a disk tier, for tools: read where they lie, past the page cache and the books of
what was used."""

from __future__ import annotations

import os
import stat
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from tiers.block import NAMESPACE_BYTES, expect, parse_header, verify
from tiers.concurrency.executors import BATCH_THREADS, spread
from tiers.disk.folder.folder import Folder
from tiers.disk.folder.open_folder import OpenFolder
from tiers.disk.folder.open_folders import open_folders
from tiers.disk.folder.owner import scan_owners
from tiers.disk.index.edit import Entry, index_key, key_digest
from tiers.disk.index.index import UNREADABLE
from tiers.disk.slab import DEFAULT_ACCESS, Access
from tiers.errors import RecordError, TierUnusable
from tiers.host.scratch import Scratch
from tiers.paths import found_at
from tiers.records import GONE, WHOLE, Finding, StoredRecord, Use, ignore

_PIECE = 4096
_TRIES = 5
"""Readings of a record that looks damaged and whose entry changes meanwhile: others use it."""


class DiskRecords:
    """`StoredRecords` of a folder, which is opened as an engine opens it, when it is first asked
    for records. A folder that an engine would empty stays, and is refused. Thread-safe."""

    def __init__(self, path: Path, access: Access = DEFAULT_ACCESS) -> None:
        self._folder, self._access = Folder(path), access
        self._opened: OpenFolder | None = None
        self._scratch: dict[int, Scratch] = {}

    def _open(self) -> OpenFolder:
        if self._opened is None:
            if found_at(self._folder.index) is None:
                raise TierUnusable(f"{self._folder.path}: found no tier there; nothing is stored")
            self._opened = open_folders.acquire(self._folder.path, None, self._access)
        return self._opened

    def listed(self) -> Iterator[Sequence[StoredRecord]]:
        opened, after = self._open(), b""
        while True:
            with opened.in_use() as folder:
                times, rows = folder.index.times(), folder.index.rows(after, _PIECE)
            if not rows:
                return
            after = rows[-1][0]
            stamps = [stamp for _, stamp in times]
            # By their places, which saves a disk with heads its seeks.
            rows.sort(key=lambda row: row[1].slot)
            yield [_listed(key, entry, times, stamps) for key, entry in rows]

    def read(self, some: Sequence[StoredRecord], use: Use = ignore) -> list[Finding]:
        with self._open().in_use() as folder:
            read = spread(partial(self._read, folder, use=use), some, folder.threads, BATCH_THREADS)
            return [finding for finding, _ in read]

    def _read(
        self, folder: OpenFolder, record: StoredRecord, use: Use = ignore
    ) -> tuple[Finding, Entry]:
        """Read a record, once more if its entry is another by now, or used since: its slot may have
        been written anew. Also returns the entry that was read."""
        now: Entry | None = record.entry
        finding, entry = GONE, record.entry
        for _ in range(_TRIES):
            if now is None:
                return GONE, entry
            entry = now
            finding = self._check(folder, record.name, entry, use)
            if finding.state == "whole":
                break
            (now,) = folder.index.find([record.name])
            if now == entry:
                break
        return finding, entry

    def _check(self, folder: OpenFolder, name: bytes, entry: Entry, use: Use) -> Finding:
        size = entry.slot.size
        scratch = self._scratch.setdefault(size, Scratch(size))
        with scratch.borrow() as memory:
            payload = memory[: entry.payload_bytes]
            try:
                ((front, checksum),) = folder.slabs[size].read(entry.slot.number, [payload])
                header = expect(front, parse_header(front).key, entry.payload_bytes)
                if index_key(header.key) != name:
                    raise RecordError("the record belongs to another key")
                if header.checksum != entry.checksum:
                    raise RecordError("the record is another than the index names")
                verify(header, payload, checksum)
            except RecordError as error:
                return Finding("damaged", str(error))
            except OSError as error:
                if error.errno not in UNREADABLE:
                    raise
                return Finding("damaged", f"unreadable: {error.strerror}")
            use(header, payload)
            return WHOLE

    def drop_damaged(self, some: Sequence[StoredRecord]) -> int:
        dropped = 0
        left = list(some)
        with self._open().in_use() as folder:
            for _ in range(_TRIES):
                read = [(record.name, *self._read(folder, record)) for record in left]
                damaged = {name: entry for name, finding, entry in read if finding.why}
                if not damaged:
                    break
                # One that was used or stored since stays, and is read again.
                dropped += folder.drop(damaged, damaged)
                held = folder.index.has(list(damaged))
                stay = {name for name, is_held in zip(damaged, held, strict=True) if is_held}
                left = [record for record in left if record.name in stay]
        return dropped

    def drop(self, some: Sequence[StoredRecord]) -> None:
        with self._open().in_use() as folder:
            folder.drop([record.name for record in some])

    def others(self) -> bool | None:
        opened = self._open()
        with opened.in_use(), self._folder.locked():
            return len(scan_owners(self._folder.owners, one_host=True).alive) > 1

    def notes(self) -> Mapping[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        with suppress(FileNotFoundError):
            for file in self._folder.namespaces.iterdir():
                with suppress(ValueError, FileNotFoundError):
                    found[bytes.fromhex(file.name)] = file.read_bytes()
        return found

    def note(self, namespace: bytes, text: bytes) -> None:
        place = self._folder.namespaces / namespace.hex()
        if not text:
            place.unlink(missing_ok=True)
            return
        self._folder.namespaces.mkdir(mode=0o700, exist_ok=True)
        found = self._folder.namespaces.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise TierUnusable(f"{self._folder.namespaces} is not a folder of this user")
        draft = place.with_name(f"{place.name}.{os.getpid()}.draft")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(os.open(draft, flags, 0o600), "wb") as file:
            file.write(text)
        draft.rename(place)

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            with opened.upkeep.held_back():
                open_folders.leave(opened)


def _listed(
    key: bytes, entry: Entry, times: Sequence[tuple[int, int]], stamps: Sequence[int]
) -> StoredRecord:
    at = bisect_left(stamps, entry.stamp) - 1
    used = float(times[at][0]) if at >= 0 else None
    return StoredRecord(
        key,
        key_digest(key),
        key[: NAMESPACE_BYTES // 2],
        entry.payload_bytes,
        entry.slot.size,
        used,
        entry.stamp,
        entry,
    )
