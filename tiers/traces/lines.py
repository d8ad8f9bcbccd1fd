"""Reads JSON objects from a file line by line, plain or zstd, with bounded memory, and checks their
fields."""

from __future__ import annotations

import json
from array import array
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn, TypeVar

from tiers.errors import TraceError
from tiers.traces.trace import TraceSummary

MAX_LINE = 32 * 2**20
"""A line may be this long: a prompt of 4 million tokens in 16-token blocks has 6 MiB of ids."""
_CHUNK = 2**18
_PLAIN = b"{", BOM_UTF8
_ZSTD_CHUNK = 2**10
"""Four compressed bytes may become 128 KiB: these become 32 MiB at most."""
_MAX_WINDOW = 2**27
"""Memory that a zstd frame may ask for: what level 19 with long matching takes."""
MAX_TOKENS = 2**30
"""No prompt or answer has as many, and to simulate one takes a second of each chain."""
MAX_TIME = 2**53
"""The last one up to which a float tells milliseconds apart."""
_MAX_ID = 2**64


class Malformed(TraceError):
    """A line that can't be used, without its place: the reader of the file adds it."""

    def at(self, path: Path, line: int) -> TraceError:
        return TraceError(f"{path}:{line}: {self}")


class Line(NamedTuple):
    """A line without its end."""

    number: int
    text: bytes
    is_whole: bool
    """False for a last line without a newline: its writer may have crashed."""


def read_lines(path: Path, summary: TraceSummary) -> Iterator[Line]:
    """Yield the lines of a file that are not empty; a `.json` is one line.

    Of a zstd file that is cut off or damaged all before the damage is read, and `summary` says so.
    Raises `TraceError` for a file that can't be read and for a line over `MAX_LINE`.
    """
    number = 0
    rest = b""
    is_one = path.suffix == ".json"
    for chunk in _chunks(path, summary):
        lines = [rest + chunk] if is_one or b"\n" not in chunk else (rest + chunk).split(b"\n")
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
    if is_one or (rest and not rest.isspace()):
        yield Line(number + 1, rest, is_one)


def parse_object(text: bytes) -> dict[str, Any]:
    """The JSON object of a line. Raises `Malformed`, also for NaN and for nested bombs."""
    try:
        found = _DECODER.decode(text.decode())
    except RecursionError:
        raise Malformed("it is nested too deep for a trace") from None
    except ValueError as error:
        raise Malformed(f"it is no JSON object ({error}): {_text(text)}") from None
    if not isinstance(found, dict):
        raise Malformed(f"it is no JSON object but {_text(text)}")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _text(line: bytes) -> str:
    return shown(line[:64].decode(errors="replace"))


def _chunks(path: Path, summary: TraceSummary) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            start = file.read(4)
            file.seek(0)
            if start.startswith(b"\x1f\x8b"):
                raise TraceError(f"{path}: it is compressed with gzip; unpack it with gunzip first")
            # A file of another name may be zstd's, and one of zstd's name may be unpacked already.
            is_zstd = start == b"\x28\xb5\x2f\xfd"
            if is_zstd or (path.suffix == ".zst" and not start.startswith(_PLAIN)):
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
    frame = None
    while rest := file.read(_ZSTD_CHUNK):
        summary.bytes_read += len(rest)
        while rest:
            frame = frame or decompressor.decompressobj()
            try:
                text = frame.decompress(rest)
            except zstandard.ZstdError as error:
                where = f"{path}: it is damaged before byte {file.tell()} ({error})"
                summary.skip("damaged ends of files", f"{where}; all before the damage was read")
                return
            rest = b""
            if frame.eof:
                rest, frame = frame.unused_data, None
            if text:
                yield text
    if frame is not None:
        where = f"{path}: it is cut off after byte {file.tell()}"
        summary.skip("cut off ends of files", f"{where}; all before its last part was read")


T = TypeVar("T")
Parse = Callable[[dict[str, Any]], T | None]
"""What a line's object is, such as a request, or None for a line that holds none; raises
`Malformed`."""


def read_objects(path: Path, parse: Parse[T], summary: TraceSummary) -> Iterator[T]:
    """Yield what `parse` makes of a file's lines, but of a last one that was cut off. Raises
    `TraceError` for a bad one, with its place."""
    for line in read_lines(path, summary):
        try:
            found = parse(parse_object(line.text))
        except Malformed as error:
            if line.is_whole:
                raise error.at(path, line.number) from None
            summary.skip("last lines that were cut off", f"{path}:{line.number}: cut off")
        else:
            if found is not None:
                yield found


# -- checked fields: a wrong one raises `Malformed` with its key ---------------------------------


def number(found: dict[str, Any], key: str) -> float:
    """A time: a number from 0 to `MAX_TIME`."""
    value = _required(found, key)
    if type(value) not in (int, float) or not 0 <= value <= MAX_TIME:
        raise Malformed(f"{key} must be a number from 0 to 2**53, not {shown(value)}")
    return float(value)


def whole(found: dict[str, Any], key: str, at_least: int = 0) -> int:
    """A whole number from `at_least` to `MAX_TOKENS`."""
    value = _required(found, key)
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or not at_least <= value <= MAX_TOKENS:
        raise Malformed(
            f"{key} must be a whole number from {at_least} to 2**30, not {shown(value)}"
        )
    return value


def hash_ids(found: dict[str, Any], key: str = "hash_ids") -> array[int]:
    """Ids: whole numbers from 0 to 2**64 - 1, of 8 bytes each, where a list takes 40: who searches
    keeps all of a trace. They may repeat."""
    value = _required(found, key)
    if type(value) is not list:
        raise Malformed(f"{key} must be a list of whole numbers, not {shown(value)}")
    if value:
        if not {int}.issuperset(map(type, value)):
            wrong = next(block for block in value if type(block) is not int)
            raise Malformed(f"{key} must be whole numbers, not {shown(wrong)}")
        if min(value) < 0 or max(value) >= _MAX_ID:
            wrong = min(value) if min(value) < 0 else max(value)
            raise Malformed(f"{key} must be from 0 to 2**64 - 1, not {shown(wrong)}")
    return array("Q", value)


def prefix_ids(found: dict[str, Any], key: str = "hash_ids") -> array[int]:
    """Ids that each stand for a block and all before it, so none comes twice in a request."""
    ids = hash_ids(found, key)
    if len(set(ids)) != len(ids):
        twice = next(block for block, count in Counter(ids).items() if count > 1)
        raise Malformed(
            f"{key} has {twice} twice; an id stands for its block and all blocks before it"
        )
    return ids


def full_blocks(ids: array[int], length: int, size: int) -> array[int]:
    """The ids of a prompt's full blocks of `size` tokens; a partial last one may have one, too."""
    blocks = -(-length // size)
    if len(ids) > blocks:
        raise Malformed(
            f"{len(ids)} hash_ids are more than the blocks of {length} tokens, "
            f"{blocks} of {size} tokens each"
        )
    return ids[: length // size]


def short_text(found: dict[str, Any], key: str) -> str | None:
    """A string of 256 characters at most, or nothing."""
    value = found.get(key)
    if value is not None and (type(value) is not str or len(value) > 256):
        raise Malformed(f"{key} must be a string of 256 characters at most, not {shown(value)}")
    return value


def shown(value: object) -> str:
    """A value in an error, cut short."""
    try:
        full = repr(value) if not isinstance(value, str) else ascii(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} that is too long to show"
    return full if len(full) <= 60 else f"{full[:57]}..."


def shown_keys(found: dict[str, Any]) -> str:
    return ", ".join(sorted(map(shown, found))[:8]) or "none"


def _required(found: dict[str, Any], key: str) -> Any:
    if key not in found:
        raise Malformed(f"it has no {key}; its keys are: {shown_keys(found)}")
    return found[key]
