"""What goes to a server and comes back, byte by byte."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from tiers.remote.resp import ServerError, command, each_command, read_flags
from tiers.remote.stream import Deadline, Stream, StreamError


@pytest.mark.parametrize("names", [[b"a"], [b"a", b"b"], [b"a", b"", b"long"]])
@pytest.mark.parametrize("after", [(), (b"100",)])
def test_commands_for_many_names_are_those_for_each(
    names: list[bytes], after: tuple[bytes, ...]
) -> None:
    joined = b"".join(command(b"PEXPIRE", name, *after) for name in names)
    assert each_command(b"PEXPIRE", names, *after) == joined


def flags(replies: bytes, count: int, piece: int) -> list[bool]:
    """What is read of a server that sends these replies in pieces of so many bytes."""
    ours, theirs = socket.socketpair()

    def send() -> None:
        for start in range(0, len(replies), piece):
            theirs.sendall(replies[start : start + piece])
            time.sleep(0)
        theirs.close()

    sender = threading.Thread(target=send)
    sender.start()
    try:
        stream = Stream(ours, Deadline(20))
        read: list[bool] = []
        while len(read) < count:
            some = read_flags(stream, count - len(read))
            assert some
            read += some
        assert stream.is_drained
        return read
    finally:
        sender.join()
        ours.close()


@pytest.mark.parametrize("piece", [1, 3, 4, 7, 1 << 20])
def test_flags_come_in_pieces_of_any_length(piece: int) -> None:
    wanted = [number % 3 == 0 for number in range(100)]
    assert flags(b"".join(b":%d\r\n" % one for one in wanted), 100, piece) == wanted


def test_more_flags_than_a_stream_takes_at_once() -> None:
    assert flags(b":1\r\n:0\r\n" * 20_000, 40_000, 1 << 20) == [True, False] * 20_000


@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_a_number_of_another_length_is_read_too(piece: int) -> None:
    assert flags(b":1\r\n:12\r\n:0\r\n:00\r\n:1\r\n", 5, piece) == [True, True, False, False, True]


@pytest.mark.parametrize("piece", [1, 1 << 20])
@pytest.mark.parametrize(
    ("replies", "error"),
    [
        (b":1\r\n-MOVED 1 there:1\r\n", ServerError),
        (b":1\r\n+OK\r\n", StreamError),
        (b":1:0\r\n\r\n", StreamError),
        (b":1\r\n:1", StreamError),
    ],
)
def test_what_is_no_number_is_no_answer(replies: bytes, error: type[Exception], piece: int) -> None:
    with pytest.raises(error):
        flags(replies, 2, piece)
