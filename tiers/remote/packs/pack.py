"""The form of a pack, byte for byte, and its name.

A pack is an index of `INDEX_BYTES`, then its blocks' records, each of `HEADER_BYTES` and a payload.
The index has a checksum of its own and, of each block in order, the digest of its key. Nothing is
served for what the index says: a record proves itself.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from tiers.block import HEADER_BYTES, NAMESPACE_BYTES, Buffer, digest
from tiers.errors import OtherFormat, RecordError
from tiers.host.slots import ALIGNMENT

PACK_VERSION = 1
"""Of the form, which each form names where this one does, in an index as long with its checksum at
the end: engines of another version leave such packs alone. A later form is to have other names
(`name_of`), too, so that neither version keeps the other from storing."""
MAX_PACK_BLOCKS = 64
"""As many as one `put` is given."""

PACK_BYTES = 8 << 20
"""What a pack comes close to: stores of objects want requests of 8 to 16 MiB, and one range of a
block of 64 KiB costs as much as one of a MiB."""

INDEX_BYTES = 2048
_MAGIC = b"kvtpack\n"
_DIGEST_BYTES = 16
_FIELDS = struct.Struct("<8sHHIQ")
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Index:
    """The index of a pack: digests of its blocks' keys, and the length of each payload."""

    digests: bytes
    payload_bytes: int

    def __len__(self) -> int:
        return len(self.digests) // _DIGEST_BYTES

    def matches(self, keys: Sequence[bytes], at: int = 0) -> int:
        """How many blocks, from its first on, are those of `keys` from number `at` on."""
        most = min(len(self), len(keys) - at)
        for count, one in zip(range(most), self.each(), strict=False):
            if digest(keys[at + count]) != one:
                return count
        return most

    def each(self) -> Iterator[bytes]:
        """The digest of each block's key, in order."""
        starts = range(0, len(self.digests), _DIGEST_BYTES)
        return (self.digests[at : at + _DIGEST_BYTES] for at in starts)


def blocks_of_pack(payload_bytes: int) -> int:
    """How many blocks of this length a group has, and a pack at most: a power of two. A page less
    counts: encryption makes each block so much longer, and packs of half as many would cost twice
    the requests."""
    count = 1
    while count < MAX_PACK_BLOCKS and 2 * count * (payload_bytes - ALIGNMENT) <= PACK_BYTES:
        count *= 2
    return count


def name_of(key: bytes) -> str:
    """The name of the pack that begins with this block: its namespace, then two digits of the rest,
    so that no folder has a million files, then all others."""
    rest = key[NAMESPACE_BYTES:].hex()
    return f"{key[:NAMESPACE_BYTES].hex()}/{rest[-2:]}/{rest}"


def key_of(name: str) -> bytes | None:
    """The key of the first block of the pack with this name; None: it is no pack's name."""
    space, _, rest = name.partition("/")
    rest = rest.partition("/")[2]
    try:
        key = bytes.fromhex(space) + bytes.fromhex(rest)
    except ValueError:
        return None
    return key if rest and name == name_of(key) else None


def record_start(number: int, payload_bytes: int) -> int:
    """Where the record of a pack's block lies, from 0 on."""
    return INDEX_BYTES + number * (HEADER_BYTES + payload_bytes)


def pack_index(keys: Sequence[bytes], payload_bytes: int) -> bytes:
    fields = _FIELDS.pack(_MAGIC, PACK_VERSION, len(keys), 0, payload_bytes)
    body = (fields + b"".join(map(digest, keys))).ljust(INDEX_BYTES - _CHECKSUM.size, b"\0")
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def parse_index(data: Buffer) -> Index:
    """Read an index. Raises RecordError unless every byte of it is as it was packed, and
    OtherFormat, which is one, if another version of kvtiers packed it."""
    if len(data) < INDEX_BYTES:
        raise RecordError(f"pack of {len(data)} bytes, {INDEX_BYTES} at least expected")
    body = bytes(data[: INDEX_BYTES - _CHECKSUM.size])
    (found,) = _CHECKSUM.unpack_from(data, len(body))
    if found != xxhash.xxh3_64_intdigest(body):
        raise RecordError("the checksum of a pack's index differs")
    magic, version, count, _, payload_bytes = _FIELDS.unpack_from(body)
    if magic == _MAGIC and version != PACK_VERSION:
        raise OtherFormat(f"a pack of format {version}; this version reads {PACK_VERSION}")
    if magic != _MAGIC or not 0 < count <= MAX_PACK_BLOCKS:
        raise RecordError("not a pack")
    start = _FIELDS.size
    return Index(body[start : start + count * _DIGEST_BYTES], payload_bytes)
