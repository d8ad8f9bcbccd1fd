"""An archive of records: one file that moves a warm cache to another host.

    head    16 bytes of magic, the length of a JSON object, that object, a checksum of all this
    frame   for each record: how its stored bytes are packed and how long they are then, a checksum
            of this and of the header; the record's header (`tiers/block.py`); the packed bytes
    end     the number of frames, and a digest of all their headers in order

A record's header has a checksum of itself and of the stored bytes, so that nothing is believed
that has changed. Frames are only ever appended: an archive that was cut off anywhere is its whole
frames.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, NamedTuple

import xxhash
from pydantic import BaseModel, Field, ValidationError

from tiers.block import (
    HEADER_BYTES,
    MAX_KEY_BYTES,
    NAMESPACE_BYTES,
    Header,
    digest,
    parse_header,
    verify,
)
from tiers.codec import compress, decompress
from tiers.concurrency.file_locks import release, try_lock
from tiers.errors import KVTiersError, RecordError
from tiers.records import MAX_NOTE_BYTES

FORMAT_VERSION = 1
MAX_HEAD_BYTES = 64 << 20
MAX_PAYLOAD_BYTES = 1 << 30
"""Of a block: whoever wrote an archive does not choose how much memory reading it takes."""
SYNC_BYTES = 256 << 20
"""The writer waits for the device after so many bytes; what is older than twice that is whole after
a power cut, too, and is not read again when an export goes on."""

_MAGIC = b"kvtiers archive\n"
_LENGTH = struct.Struct("<II")
_CHECKSUM = struct.Struct("<Q")
_FRAME = struct.Struct("<4sIQQ")
_RECORD, _END = b"KVR\n", b"KVE\n"
_PLAIN, _ZSTD = 0, 1


class ArchiveError(KVTiersError):
    """A file is no archive, or can't be used as this one; says what would do."""


class ArchiveHead(BaseModel, frozen=True, extra="forbid"):
    """What an archive says of all its records. `keys`: marks of the keys that they are encrypted
    with (`tiers/wrappers/encryption.py`); none: they are not. `notes`: of namespaces, by hex."""

    keys: tuple[str, ...] = ()
    notes: Mapping[
        Annotated[str, Field(pattern=f"^[0-9a-f]{{{2 * NAMESPACE_BYTES}}}$")],
        Annotated[str, Field(max_length=MAX_NOTE_BYTES)],
    ] = Field(default_factory=dict)

    def encode(self) -> bytes:
        text = self.model_dump_json().encode()
        head = _MAGIC + _LENGTH.pack(FORMAT_VERSION, len(text)) + text
        return head + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))


class Frame(NamedTuple):
    """A record in an archive, yet to be read: `offset` and `size` of its packed bytes."""

    header: Header
    is_packed: bool
    offset: int
    size: int


class ArchiveReader:
    """Reads an archive from its beginning. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, and ArchiveError for a file that is none of this version."""
        self._path = path
        self._file = path.open("rb")
        self.size = os.fstat(self._file.fileno()).st_size
        self.headers = xxhash.xxh3_64()
        """The digest of the headers read so far, to go on with."""
        self.count = 0
        self.end = 0
        """Where the last whole frame that was read ends."""
        self.is_whole = False
        """Whether the end has been read, and is that of these frames."""
        try:
            self.head = self._read_head()
        except BaseException:
            self._file.close()
            raise

    def _read_head(self) -> ArchiveHead:
        front = self._read(len(_MAGIC) + _LENGTH.size, 0)
        if not front.startswith(_MAGIC) or len(front) < len(_MAGIC) + _LENGTH.size:
            raise ArchiveError(f"{self._path}: no archive of kvtiers")
        version, length = _LENGTH.unpack_from(front, len(_MAGIC))
        if version != FORMAT_VERSION:
            raise ArchiveError(
                f"{self._path}: an archive of format {version}; this kvtiers reads {FORMAT_VERSION}"
            )
        rest = self._read(min(length, MAX_HEAD_BYTES) + _CHECKSUM.size, len(front))
        text, sum_ = rest[:-8], rest[-8:]
        if len(text) != length or sum_ != _CHECKSUM.pack(xxhash.xxh3_64_intdigest(front + text)):
            raise ArchiveError(f"{self._path}: the head of this archive is damaged")
        self.end = len(front) + len(rest)
        try:
            return ArchiveHead.model_validate_json(text)
        except ValidationError as error:
            raise ArchiveError(
                f"{self._path}: the head of this archive is none of kvtiers"
            ) from error

    def frames(self) -> Iterator[Frame]:
        """The frames in order, up to the end, or to the first that is damaged or cut."""
        while True:
            front = self._read(_FRAME.size + HEADER_BYTES, self.end)
            if len(front) < _FRAME.size:
                return
            kind, packing, size, sum_ = _FRAME.unpack_from(front)
            if kind == _END:
                self.is_whole = (size, sum_) == (self.count, self.headers.intdigest())
                return
            header_bytes = front[_FRAME.size :]
            offset = self.end + _FRAME.size + HEADER_BYTES
            is_record = kind == _RECORD and sum_ == _frame_sum(packing, size, header_bytes)
            if not is_record or offset + size > self.size:
                return
            try:
                header = parse_header(header_bytes)
            except RecordError:
                return
            if not _is_sound(header) or size > header.stored_bytes:
                return
            yield Frame(header, packing == _ZSTD, offset, size)
            self.headers.update(header_bytes)
            self.count += 1
            self.end = offset + size

    def stored(self, frame: Frame) -> bytes:
        """A frame's stored bytes. Raises RecordError if they are not those of its header."""
        data = self._read(frame.size, frame.offset)
        if frame.is_packed:
            data = decompress(data, frame.header.stored_bytes)
        verify(frame.header, data)
        if not frame.header.codec and len(data) != frame.header.payload_bytes:
            raise RecordError("plain bytes of another length than the block's")
        return data

    def _read(self, size: int, offset: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(size)

    def close(self) -> None:
        self._file.close()


def _is_sound(header: Header) -> bool:
    """Whether a tier could have a record of this header."""
    sizes = header.payload_bytes, header.stored_bytes
    has_key = NAMESPACE_BYTES < len(header.key) <= MAX_KEY_BYTES
    return has_key and min(sizes) > 0 and max(sizes) <= MAX_PAYLOAD_BYTES


def _frame_sum(packing: int, size: int, header: bytes) -> int:
    return xxhash.xxh3_64_intdigest(_FRAME.pack(_RECORD, packing, size, 0) + header)


class PackedRecord(NamedTuple):
    """A record as an archive keeps it."""

    header: Header
    is_packed: bool
    data: bytes


def pack(header: Header, stored: memoryview) -> PackedRecord:
    """Pack a record, if that makes it smaller. Any thread may; costs a core 1 to 2 s a GB."""
    packed = compress(stored)
    is_packed = len(packed) < len(stored)
    return PackedRecord(header, is_packed, packed if is_packed else bytes(stored))


class ArchiveWriter:
    """Writes an archive beside its place, and puts it there when it is whole. One that was begun is
    continued behind its last whole frame. Not thread-safe."""

    def __init__(self, path: Path, head: ArchiveHead) -> None:
        """Raises OSError, and ArchiveError if another process writes it, or it was begun by another
        user, or from a tier with other encryption keys."""
        self._path = path
        self._part = path.with_name(f"{path.name}.part")
        self.held: set[bytes] = set()
        """Digests of the keys that were in it when it was opened."""
        self._handle = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        self._count, self._headers, self._end = 0, xxhash.xxh3_64(), 0
        try:
            if not try_lock(self._handle):
                raise ArchiveError(f"{self._part}: another process writes it")
            self._continue(head)
        except BaseException:
            release(self._handle)
            raise
        self._synced = self._end

    def _continue(self, head: ArchiveHead) -> None:
        found = os.fstat(self._handle)
        if begun := found.st_size:
            try:
                self._read_again(head)
            except ArchiveError:
                # One that was killed in its head begins anew; anything else is somebody's.
                if self._end or os.pread(self._handle, len(_MAGIC), 0) != _MAGIC[:begun]:
                    raise
        if found.st_uid != os.geteuid():
            raise ArchiveError(f"{self._part}: it is user {found.st_uid}'s; name another file")
        os.fchmod(self._handle, 0o600)
        os.ftruncate(self._handle, self._end)
        if not self._end:
            self._write([head.encode()])

    def _read_again(self, head: ArchiveHead) -> None:
        with closing(ArchiveReader(self._part)) as reader:
            self._end = reader.end
            if set(reader.head.keys) != set(head.keys):
                raise ArchiveError(
                    f"{self._part}: it was begun from a tier with other encryption keys; remove it"
                )
            for frame in reader.frames():
                if frame.offset > reader.size - 2 * SYNC_BYTES:
                    try:
                        reader.stored(frame)
                    except RecordError:
                        break
                self.held.add(digest(frame.header.key))
            self._end, self._count, self._headers = reader.end, reader.count, reader.headers

    def add(self, record: PackedRecord) -> None:
        """Add a record that is not there. Raises OSError."""
        front, packing = record.header.pack(), _ZSTD if record.is_packed else _PLAIN
        sum_ = _frame_sum(packing, len(record.data), front)
        frame = _FRAME.pack(_RECORD, packing, len(record.data), sum_)
        self._write([frame, front, record.data])
        self._headers.update(front)
        self._count += 1
        if self._end > self._synced + SYNC_BYTES:
            os.fdatasync(self._handle)
            self._synced = self._end

    def _write(self, parts: Sequence[bytes]) -> None:
        for part in parts:
            view = memoryview(part)
            while view:
                done = os.pwrite(self._handle, view, self._end)
                view, self._end = view[done:], self._end + done

    def finish(self) -> None:
        """Write the end and give the archive its name."""
        self._write([_FRAME.pack(_END, 0, self._count, self._headers.intdigest())])
        os.fsync(self._handle)
        self._part.rename(self._path)

    def close(self) -> None:
        """Close it; one that is not finished stays, to be continued."""
        release(self._handle)


def require_new(path: Path) -> None:
    """Raise ArchiveError where a file is: an archive has what its tier held then, and not now."""
    if path.exists():
        with closing(ArchiveReader(path)) as reader:
            blocks = sum(1 for _ in reader.frames())
            found = f"whole already, {blocks:,} blocks"
            if not reader.is_whole:
                found = "not a whole archive"
        raise ArchiveError(f"{path}: {found}; remove it, or name another file")
