"""Commands and replies of protocol 2, as far as the remote tier needs them.

Protocol 2 needs no greeting, works with every server, and nothing of protocol 3 is used.
"""

from __future__ import annotations

from tiers.remote.stream import AHEAD_BYTES, Stream, StreamError

Reply = bytes | int | list["Reply"] | None
"""What a small command is answered; text as bytes."""

_MOST_TEXT = 64 << 10
_MOST_ITEMS = 1 << 16
_DEEPEST = 6


class ServerError(Exception):
    """A reply that says no. `code` is its first word: OOM, WRONGTYPE, MOVED, ASK, NOAUTH..."""

    @property
    def code(self) -> str:
        """The first word."""
        return str(self).partition(" ")[0]


def command(*words: bytes) -> bytes:
    """A whole command."""
    return opening(len(words)) + b"".join(opening_of(len(word)) + word + b"\r\n" for word in words)


def opening(words: int) -> bytes:
    """The start of a command of that many words."""
    return b"*%d\r\n" % words


def opening_of(length: int) -> bytes:
    """What precedes a word of that many bytes."""
    return b"$%d\r\n" % length


def read_status(stream: Stream) -> None:
    """Read the reply of a command that has nothing to tell. Raises ServerError if it failed."""
    _read(stream, b"+", AHEAD_BYTES)


def read_integer(stream: Stream) -> int:
    """Read a number. Raises ServerError."""
    return _number(_read(stream, b":", AHEAD_BYTES))


def read_length(stream: Stream, ahead: int) -> int:
    """Read how long the value is that follows, -1 where there is none. Raises ServerError.

    `ahead` limits what is received beyond it, so that the value itself stays in the socket.
    """
    length = _number(_read(stream, b"$", ahead))
    if length < -1:
        raise StreamError("not a length")
    return length


def read_reply(stream: Stream, depth: int = 0) -> Reply:
    """Read any reply that is no block. Raises ServerError, or StreamError for an absurd one."""
    line = stream.line()
    kind, rest = line[:1], line[1:]
    if kind == b"-":
        raise ServerError(rest.decode(errors="replace"))
    if kind == b"+":
        return rest
    number = _number(rest)
    if kind == b":":
        return number
    if number < 0:
        return None
    if kind == b"$" and number <= _MOST_TEXT:
        text = bytearray(number)
        stream.fill(memoryview(text), AHEAD_BYTES)
        stream.line()
        return bytes(text)
    if kind == b"*" and number <= _MOST_ITEMS and depth < _DEEPEST:
        return [read_reply(stream, depth + 1) for _ in range(number)]
    raise StreamError("not the reply of a Redis server")


def _read(stream: Stream, kind: bytes, ahead: int) -> bytes:
    line = stream.line(ahead)
    if line.startswith(b"-"):
        raise ServerError(line[1:].decode(errors="replace"))
    if not line.startswith(kind):
        raise StreamError("not the reply of a Redis server")
    return line[1:]


def _number(digits: bytes) -> int:
    if not digits.removeprefix(b"-").isdigit() or len(digits) > 20:
        raise StreamError("not a number")
    return int(digits)
