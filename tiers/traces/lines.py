"""Reading a file line by line: plain or zstd, whole or cut off, with bounded memory."""

from __future__ import annotations

import json
import os
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from tiers.errors import TraceError
from tiers.traces.trace import TraceRequest, TraceSummary

MAX_LINE = 32 * 2**20
"""A line may be this long: a prompt of 4 million tokens in 16-token blocks has 6 MiB of ids."""
_CHUNK = 2**18
_PLAIN = b"{", BOM_UTF8
_GZIP = b"\x1f\x8b"
_MAX_WINDOW = 2**27
"""Memory that a zstd frame may ask for: what level 19 with long matching takes."""


class Malformed(TraceError):
    """A line that can't be used, without its place: whoever knows file and line adds them."""


class Line(NamedTuple):
    """A line without its end."""

    number: int
    text: bytes
    is_whole: bool
    """False for a last line without a newline: its writer may have crashed."""


def read_lines(path: Path, summary: TraceSummary) -> Iterator[Line]:
    """Yield the lines of a file that are not empty.

    Of a zstd file that is cut off or damaged what precedes the damage is read, and `summary` says
    so. Raises `TraceError` for a file that can't be read and for a line over `MAX_LINE`.
    """
    number = 0
    rest = b""
    for chunk in _chunks(path, summary):
        lines = (rest + chunk).split(b"\n") if b"\n" in chunk else [rest + chunk]
        rest = lines.pop()
        for text in lines:
            number += 1
            if text and not text.isspace():
                yield Line(number, text, True)
        if len(rest) > MAX_LINE:
            raise TraceError(
                f"{path}:{number + 1}: the line is longer than {MAX_LINE >> 20} MiB; "
                "a trace has one JSON object a line, which ends with a newline"
            )
    if rest and not rest.isspace():
        yield Line(number + 1, rest, False)


def parse_object(text: bytes) -> dict[str, Any]:
    """The JSON object of a line. Raises `Malformed`, also for NaN and for nested bombs."""
    try:
        found = _DECODER.decode(text.decode())
    except RecursionError:
        raise Malformed("it is nested too deep for a trace") from None
    except ValueError as error:
        raise Malformed(f"it is no JSON object ({error}): {_shortened(text)}") from None
    if not isinstance(found, dict):
        raise Malformed(f"it is no JSON object but {_shortened(text)}")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _shortened(text: bytes) -> str:
    shown = ascii(text[:60].decode(errors="replace"))
    return shown if len(text) <= 60 else f"{shown}..."


def _chunks(path: Path, summary: TraceSummary) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            start = file.read(4)
            file.seek(0)
            if start.startswith(_GZIP):
                raise TraceError(f"{path}: it is compressed with gzip; unpack it with gunzip first")
            # A file of another name may be zstd's, and one of zstd's name may be unpacked already.
            if start == MAGIC or (path.suffix == ".zst" and not start.startswith(_PLAIN)):
                yield from _decompressed(path, file, summary)
                return
            if start.startswith(BOM_UTF8):
                file.seek(len(BOM_UTF8))
            while chunk := file.read(_CHUNK):
                summary.bytes_read += len(chunk)
                yield chunk
    except OSError as error:
        raise TraceError(f"{path}: it can't be read: {error.strerror or error}") from error


def _decompressed(path: Path, file: BinaryIO, summary: TraceSummary) -> Iterator[bytes]:
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
    stream = decompressor.stream_reader(file, read_across_frames=True, closefd=False)
    before = 0
    while True:
        try:
            chunk = stream.read1(_CHUNK)  # read() loses what precedes an error
        except zstandard.ZstdError as error:
            where = f"{path}: it is damaged before byte {file.tell()} ({error})"
            summary.skip("damaged ends of files", f"{where}; what precedes that was read")
            return
        summary.bytes_read += file.tell() - before
        before = file.tell()
        if not chunk:
            break
        yield chunk
    if not ends_whole(file, before):
        where = f"{path}: it is cut off after byte {before}; what precedes its last part was read"
        summary.skip("cut off ends of files", where)


MAGIC = b"\x28\xb5\x2f\xfd"
_HEADER = 18
"""Bytes of the longest header."""
_RLE = 1
_SKIPPABLE = range(0x184D2A50, 0x184D2A60)


def ends_whole(file: BinaryIO, size: int) -> bool:
    """Whether the first `size` bytes are whole frames, by the lengths that their parts tell."""
    at: int | None = 0
    while at is not None and at < size:
        at = _frame_end(file, at)
    return at == size


def _frame_end(file: BinaryIO, at: int) -> int | None:
    """Where the frame ends that begins there; None: that can't be told."""
    import zstandard

    head = _at(file, at, _HEADER)
    if int.from_bytes(head[:4], "little") in _SKIPPABLE:
        return at + 8 + int.from_bytes(head[4:8], "little")
    try:
        has_checksum = zstandard.get_frame_parameters(head).has_checksum
        at += zstandard.frame_header_size(head)
    except zstandard.ZstdError:
        return None
    is_last = False
    while not is_last:
        block = _at(file, at, 3)
        if len(block) < 3:
            return None
        header = int.from_bytes(block, "little")
        is_last = bool(header & 1)
        at += 3 + (1 if header >> 1 & 3 == _RLE else header >> 3)
    return at + 4 * has_checksum


def _at(file: BinaryIO, at: int, size: int) -> bytes:
    file.seek(at, os.SEEK_SET)
    return file.read(size)


Parse = Callable[[dict[str, Any]], TraceRequest | None]
"""A line's object as a request, or None for a line that holds none; raises `Malformed`."""


def read_requests(
    path: Path, parse: Parse, summary: TraceSummary, skip_bad: bool
) -> Iterator[TraceRequest]:
    """Yield a file's requests. A bad line is a `TraceError` with its place, or is skipped and
    counted; a last line that was cut off is always skipped."""
    for line in read_lines(path, summary):
        try:
            request = parse(parse_object(line.text))
        except Malformed as error:
            placed = place(error, path, line.number)
            if not line.is_whole:
                summary.skip("last lines that were cut off", f"{path}:{line.number}: cut off")
            elif skip_bad:
                summary.skip("bad lines", str(placed))
            else:
                raise placed from None
        else:
            if request is not None:
                yield request


def place(error: Malformed, path: Path, line: int) -> TraceError:
    """The error with its file and line."""
    return TraceError(f"{path}:{line}: {error}")
