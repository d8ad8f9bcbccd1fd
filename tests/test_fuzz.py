"""No bytes from a disk, a server or an operator do more than fail to be what they should be.

Each target takes any bytes and ends, with none but the errors that its parser promises: here on
what Hypothesis makes up, under `python -m tests.fuzz` for as long as one likes.
"""

from __future__ import annotations

import socket
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import lmdb
import pytest
import xxhash
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spec.errors import SpecError
from spec.load import load_chain
from tiers.block import HEADER_BYTES, expect, parse_header, verify
from tiers.codec import CODECS, decode
from tiers.disk.index.edit import parse_changes, parse_entry
from tiers.errors import RecordError, TraceError
from tiers.remote.deadline import Deadline
from tiers.remote.redis.stream import ServerError, Stream, StreamError, read_flags
from tiers.traces.open_trace import open_trace
from tiers.traces.recorded import FileHeader, encode_header

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
                    read_flags(stream, 2)


def chain(data: bytes) -> None:
    """A YAML file."""
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        file.write(data)
        file.flush()
        with suppress(SpecError):
            load_chain(Path(file.name))


def trace(data: bytes) -> None:
    """A file of a trace: any bytes, and any bytes behind a first line that is as it should be."""
    header = encode_header(FileHeader(16, 0.0))
    for suffix in (".jsonl", ".json", ".jsonl.zst"):
        for content in (data, header + data):
            if suffix.endswith("zst"):
                content = zstandard.compress(content) + data
            with tempfile.NamedTemporaryFile(suffix=suffix) as file:
                file.write(content)
                file.flush()
                with suppress(TraceError):
                    opened = open_trace(Path(file.name))
                    assert all(one.timestamp >= 0 for one in opened)


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (record, codec, row, reply, chain, trace)
}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=2000))
@example(b"*3\r\n$3\r\nabc\r\n:-1\r\n*1\r\n$-1\r\n-ERR no\r\n")
@example(b'{"timestamp": 1, "input_length": 16, "output_length": 0, "hash_ids": [1]}\n')
@example(b'{"block_size": 64, "requests": [{"t": 0, "in": 64, "out": 1, "hash_ids": [1]}]}')
@example(b"version: 1\ntiers:\n  - {type: cpu, capacity: 8GiB}\n")
def test_any_bytes(target: Callable[[bytes], None], data: bytes) -> None:
    target(data)
