"""RESP: commands and replies of the Redis protocol, version 2, as far as the remote tier uses them.

Version 2 needs no greeting and works with every server; nothing of version 3 is used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tiers.errors import KVTiersError
from tiers.remote.stream import AHEAD_BYTES, Stream, StreamError

OK = b"+OK\r\n"
"""The reply to a SET."""

_FLAGS = re.compile(rb"(?::[01]\r\n)*+")
_FLAG_BYTES = len(b":1\r\n")
_ONE = ord("1")


class ServerError(KVTiersError):
    """An error reply. `code` is its first word: OOM, WRONGTYPE, MOVED, ASK, NOAUTH..."""

    @property
    def code(self) -> str:
        return str(self).partition(" ")[0]


def command(*words: bytes) -> bytes:
    """Encode a command: an array of bulk strings."""
    return array_header(len(words)) + b"".join(map(bulk, words))


def each_command(verb: bytes, names: Sequence[bytes], *after: bytes) -> bytes:
    """Encode a command for each name: the verb, the name, and what comes after it. Names of one
    length, as a prompt's are, cost a tenth of `command` each."""
    if len({*map(len, names)}) > 1:
        return b"".join(command(verb, name, *after) for name in names)
    head = array_header(2 + len(after)) + bulk(verb) + bulk_header(len(names[0]))
    tail = b"\r\n" + b"".join(map(bulk, after))
    return head + (tail + head).join(names) + tail


def array_header(words: int) -> bytes:
    """Encode the header of an array (a command) of that many words."""
    return b"*%d\r\n" % words


def bulk(word: bytes) -> bytes:
    return bulk_header(len(word)) + word + b"\r\n"


def bulk_header(length: int) -> bytes:
    """Encode the header of a bulk string (a word or value) of that many bytes."""
    return b"$%d\r\n" % length


def read_status(stream: Stream) -> None:
    """Read a simple string, such as OK. Raises ServerError for an error reply."""
    _read(stream, b"+", AHEAD_BYTES)


def read_integer(stream: Stream) -> int:
    """Read an integer. Raises ServerError."""
    return _number(_read(stream, b":", AHEAD_BYTES))


def read_flags(stream: Stream, most: int) -> list[bool]:
    """Read up to `most` integers, one at least: whether each is more than 0. Raises ServerError.

    Waits for as many bytes as so many answers have at least, whatever they are.
    """
    seen = stream.peek(most * _FLAG_BYTES)
    plain = _FLAGS.match(seen)
    size = min(plain.end() if plain else 0, most * _FLAG_BYTES)
    if not size:
        return [read_integer(stream) > 0]
    stream.skip(size)
    return [flag == _ONE for flag in seen[1:size:_FLAG_BYTES]]


def read_length(stream: Stream, ahead: int) -> int:
    """Read the header of a bulk string: its length, -1 if there is no value. Raises ServerError.

    `ahead`: most bytes to receive beyond the header, so that the value stays in the socket.
    """
    length = _number(_read(stream, b"$", ahead))
    if length < -1:
        raise StreamError("a malformed length in the reply")
    return length


def _read(stream: Stream, kind: bytes, ahead: int) -> bytes:
    found, rest = _line(stream, ahead)
    if found != kind:
        raise StreamError("not the reply of a Redis server")
    return rest


def _line(stream: Stream, ahead: int) -> tuple[bytes, bytes]:
    line = stream.line(ahead)
    if line.startswith(b"-"):
        raise ServerError(line[1:].decode(errors="replace"))
    return line[:1], line[1:]


def _number(digits: bytes) -> int:
    if not digits.removeprefix(b"-").isdigit() or len(digits) > 20:
        raise StreamError("a malformed number in the reply")
    return int(digits)
