"""Parsers of what comes from outside, as fuzzers want them.

Each target takes any bytes and ends, with none but the errors that its parser promises. They run
inside the tests on what Hypothesis makes up, and under `tests.support.fuzz` for as long as one
likes.
"""

from __future__ import annotations

import socket
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import lmdb
import xxhash

from spec.errors import SpecError
from spec.load import load_chain
from tiers.block import HEADER_BYTES, expect, parse_header, verify
from tiers.codec import CODECS, decode
from tiers.disk.rows import parse_changes, parse_entry
from tiers.errors import RecordError
from tiers.remote.resp import ServerError, read_reply
from tiers.remote.stream import Deadline, Stream, StreamError

KEY = bytes(range(48))
LENGTH = 300
_SEALED = 192


def record(data: bytes) -> None:
    """A header that is as it was written but for who wrote it, and what follows it."""
    fields = data[:_SEALED].ljust(_SEALED, b"\0")
    checksum = struct.pack("<Q", xxhash.xxh3_64_intdigest(fields))
    whole = (fields + checksum).ljust(HEADER_BYTES, b"\0")
    with suppress(RecordError):
        verify(parse_header(whole), data[_SEALED:])
    with suppress(RecordError):
        header = expect(whole, KEY, LENGTH)
        assert (header.key, header.payload_bytes) == (KEY, LENGTH)


def codec(data: bytes) -> None:
    """Stored bytes in any coding; what is around the payload stays as it was."""
    around = bytearray(b"\xa5" * 3 * LENGTH)
    with suppress(RecordError):
        decode(data[0] if data else 0, data[1:], memoryview(around)[LENGTH : 2 * LENGTH])
        assert (data[0] if data else 0) in CODECS.values()
    assert around[:LENGTH] == around[2 * LENGTH :] == b"\xa5" * LENGTH


def row(data: bytes) -> None:
    """Rows of the disk tier's index."""
    for parse in (parse_entry, parse_changes):
        with suppress(lmdb.CorruptedError):
            parse(data)


def reply(data: bytes) -> None:
    """What a server answers before it hangs up."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data[: 32 << 10])
        theirs.shutdown(socket.SHUT_WR)
        stream = Stream(ours, Deadline(5.0))
        with suppress(StreamError):
            while True:
                with suppress(ServerError):
                    read_reply(stream)


def chain(data: bytes) -> None:
    """A YAML file."""
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        file.write(data)
        file.flush()
        with suppress(SpecError):
            load_chain(Path(file.name))


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (record, codec, row, reply, chain)
}
