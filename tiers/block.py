"""What is stored, byte for byte? A namespace and a key name a block; a record holds it.

A record is a header of `HEADER_BYTES` and the stored payload. Every tier that outlives the
process writes it, so that a block can prove what it is: nothing is believed because of where it
was found. The checksum is xxh3: it finds accidents (14 GB/s against 8.4 for a copy, measured with
2 MiB blocks on two busy cores), and is no defence against someone who can write to the tier.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import xxhash

from tiers.errors import OtherFormat, RecordError

FORMAT_VERSION = 1
"""Part of each namespace, so that engines of two formats do not meet each other's records."""
KV_REVISION = 5
"""Part of each namespace, too: raised when KV that was stored before may be wrong, by a mistake of
ours that was mended since. Nothing else tells such blocks from right ones."""
NAMESPACE_BYTES = 16
MAX_KEY_BYTES = 128
"""Longest key, its namespace included."""

HEADER_BYTES = 512
"""One disk sector, so that a payload behind it stays aligned for direct I/O."""

MAGIC = b"kvtiers\n"
_FIELDS = struct.Struct("<8sHBBHHQQ16s16s128s")
_CHECKSUM = struct.Struct("<Q")
_CHECKED_BYTES = _FIELDS.size + _CHECKSUM.size
_PADDING = bytes(HEADER_BYTES - _CHECKED_BYTES)
_CHECKSUM_XXH3_128 = 1

Buffer = bytes | bytearray | memoryview


class _PyBuffer(ctypes.Structure):
    """CPython's `Py_buffer`."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("others", ctypes.c_void_p * 5),
    )


def address_of(view: memoryview) -> int:
    """Where the bytes of a contiguous view begin, also of one that is read-only, which ctypes and
    torch take for writable only. Owns nothing: keep the view as long as the address is used."""
    found = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(found), 0)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(found))
    return found.buf or 0


HELD_BYTES = 256 << 10
"""Bytes that are copied without letting go of the interpreter's lock, at most: the engine's thread
would have it for a whole step then. A load of 1,024 rows of 64 KiB took 37 ms so, else 67."""


def copy(target: memoryview, source: Buffer) -> None:
    """Fill `target` from a source of as many bytes, both contiguous. More than `HELD_BYTES` are
    copied without the interpreter's lock: an engine that launched a step meanwhile took three times
    as long. Raises ValueError for another length, and TypeError for a target that is read-only."""
    if len(source) <= HELD_BYTES or len(source) != len(target) or target.readonly:
        target[:] = source
    else:
        ctypes.memmove(address_of(target), address_of(memoryview(source)), len(source))


def after(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of these behind their first `count` bytes."""
    for number, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[number + 1 :]]
        count -= len(view)
    return []


class Header(NamedTuple):
    """A verified header. Lengths are in bytes; `checksum` is of the stored bytes."""

    key: bytes
    codec: int
    payload_bytes: int
    stored_bytes: int
    checksum: bytes

    def pack(self) -> bytes:
        """Its bytes in a record."""
        fields = _FIELDS.pack(
            MAGIC,
            FORMAT_VERSION,
            self.codec,
            _CHECKSUM_XXH3_128,
            len(self.key),
            0,
            self.payload_bytes,
            self.stored_bytes,
            self.checksum,
            self.key[:NAMESPACE_BYTES],
            self.key[NAMESPACE_BYTES:],
        )
        checked = fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))
        return checked.ljust(HEADER_BYTES, b"\0")


def namespace(facts: Mapping[str, str], rank: int, world_size: int) -> bytes:
    """Digest all that makes KV interchangeable into 16 bytes: `facts` name the model, its weights,
    dtype, KV layout and so on."""
    all_facts = {"format": FORMAT_VERSION, "revision": KV_REVISION, "facts": dict(facts)}
    text = json.dumps({**all_facts, "rank": rank, "world": world_size}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=NAMESPACE_BYTES).digest()


def digest(data: Buffer) -> bytes:
    return xxhash.xxh3_128_digest(data)


def pack_header(
    key: bytes, payload_bytes: int, stored: Buffer, codec: int = 0, checksum: bytes | None = None
) -> bytes:
    """Make the header of a record whose stored bytes are `stored`. `checksum`: theirs, where it is
    known already."""
    if not NAMESPACE_BYTES < len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"key of {len(key)} bytes; {NAMESPACE_BYTES + 1}..{MAX_KEY_BYTES} fit")
    return Header(key, codec, payload_bytes, len(stored), checksum or digest(stored)).pack()


def parse_header(data: Buffer) -> Header:
    """Read a header. Raises RecordError unless every byte of it is as it was packed, and
    OtherFormat, which is one, if another version of kvtiers packed it."""
    if len(data) < HEADER_BYTES:
        raise RecordError(f"header of {len(data)} bytes, {HEADER_BYTES} expected")
    fields = bytes(data[: _FIELDS.size])
    (found,) = _CHECKSUM.unpack_from(data, _FIELDS.size)
    if found != xxhash.xxh3_64_intdigest(fields):
        raise RecordError("header checksum differs")
    magic, version, codec, kind, key_len, _, payload, stored, checksum, space, rest = (
        _FIELDS.unpack(fields)
    )
    if magic != MAGIC:
        raise RecordError("not a record")
    if version != FORMAT_VERSION or kind != _CHECKSUM_XXH3_128:
        raise OtherFormat(f"not a record of format {FORMAT_VERSION}")
    if data[_CHECKED_BYTES:HEADER_BYTES] != _PADDING:
        raise RecordError("header padding is not zero")
    return Header(space + rest[: key_len - NAMESPACE_BYTES], codec, payload, stored, checksum)


def expect(data: Buffer, key: bytes, payload_bytes: int) -> Header:
    """Read a header that must belong to `key` and a payload of that length, else RecordError."""
    header = parse_header(data)
    if header.key != key:
        raise RecordError("the record belongs to another key")
    if header.payload_bytes != payload_bytes:
        raise RecordError(f"payload of {header.payload_bytes} bytes, {payload_bytes} expected")
    return header


Checksum = xxhash.xxh3_128
"""The checksum of stored bytes that come piece by piece, each still in the processor's caches: a
tenth of a load from a fast link against a second pass over 2 MiB."""


def verify(header: Header, stored: Buffer, checksum: bytes | None = None) -> None:
    """Raise RecordError unless `stored` is byte for byte what the header was packed for.

    `checksum`: the digest of a `Checksum` that was given just these bytes; it spares another pass.
    """
    if len(stored) != header.stored_bytes:
        raise RecordError(f"{len(stored)} stored bytes, {header.stored_bytes} expected")
    if (checksum or digest(stored)) != header.checksum:
        raise RecordError("payload checksum differs")
