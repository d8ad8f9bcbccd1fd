"""RedisClient: the few commands that the remote tier needs, with errors translated.

redis-py connects and authenticates. Commands and replies then travel on its sockets directly, where
values need no copy and a whole verb has one deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tiers.errors import TierUnavailable
from tiers.remote import pipeline
from tiers.remote.pipeline import GetRequest, OnValue, Record, Window
from tiers.remote.pools import ConnectionSettings, reason
from tiers.remote.resp import ServerError, each_command, read_flags
from tiers.remote.stream import Deadline, Stream
from tiers.remote.topology import FAILURES, Cluster, Kind, OneServer, Operation, Sentinels, Topology

SLOWEST = 32 << 20
"""Bytes a second for which a verb that moves values gets extra time: half of a gigabit link.
Computing a block again is faster than loading it over a slower link."""

EACH = 0.01
"""Extra seconds that a verb gets for each name: a thread of the engine that is busy with Python
keeps ours waiting for 5 ms at a time."""


class RedisClient:
    """Speaks to the server or servers of a URL. Thread-safe; a forked child connects anew.

    A method ends at its deadline, connecting included, however many servers it asks; only a silent
    name server can make it take longer. A connection found dead when it is borrowed is made anew
    once, and names that moved within a cluster are looked for once more; nothing else is tried
    again. A connection on which anything but whole replies was read is closed. Every method raises
    TierUnavailable if no server answers. While some nodes of a cluster answer, the names of the
    others have no value and take none.
    """

    def __init__(self, settings: ConnectionSettings, timeout: float, ttl: float | None) -> None:
        self._url = settings.url
        self._timeout = timeout
        self._ttl_ms = None if ttl is None else b"%d" % max(1, round(ttl * 1000))
        self._topology = _topology(settings, timeout)
        self._window = Window()

    def limit(self, names: int, num_bytes: int = 0) -> Deadline:
        """The deadline of a verb that begins now, for that many names and bytes at most."""
        return Deadline(self._timeout + EACH * names + num_bytes / SLOWEST)

    def exists(self, names: Sequence[bytes], deadline: Deadline) -> list[bool]:
        """Say for each name whether it has a value, in one round trip."""
        return self._ask(names, "reads", deadline, b"EXISTS")

    def refresh(self, names: Sequence[bytes], deadline: Deadline) -> list[bool]:
        """As `exists`; the ttl of each value that exists starts anew."""
        ttl = self._ttl_ms
        if ttl is None:
            return self.exists(names, deadline)
        return self._ask(names, "writes", deadline, b"PEXPIRE", ttl)

    def delete(self, names: Sequence[bytes], deadline: Deadline) -> None:
        """Delete these names; the server frees their memory in the background."""
        self._ask(names, "writes", deadline, b"UNLINK")

    def store(
        self, names: Sequence[bytes], record: Callable[[int], Record], deadline: Deadline
    ) -> list[bool]:
        """Store under `names[i]` the value `record(i)`; False where the server refused it."""
        stored = [False] * len(names)
        expiry = () if self._ttl_ms is None else (b"PX", self._ttl_ms)

        def operation(stream: Stream, positions: Sequence[int]) -> None:
            here = [names[position] for position in positions]
            done = pipeline.store(
                stream, here, lambda at: record(positions[at]), expiry, self._window
            )
            for position, answer in zip(positions, done, strict=True):
                stored[position] = answer

        self._dispatch(names, "writes", operation, deadline)
        return stored

    def load(self, requests: Sequence[GetRequest], on_value: OnValue, deadline: Deadline) -> None:
        """Load values into the memory of `requests`, and tell `on_value` of each that exists, once:
        as None if it is no string, or longer than its request's memory."""
        came: set[int] = set()

        def operation(stream: Stream, positions: Sequence[int]) -> None:
            # Where some names have moved, all of their server are to be looked for again. Of one
            # that came before and is gone by now, other values would be left in its memory.
            here = [position for position in positions if position not in came]

            def told(at: int, got: Record | None) -> None:
                came.add(here[at])
                on_value(here[at], got)

            if here:
                wanted = [requests[position] for position in here]
                pipeline.load(stream, wanted, told, self._window)

        self._dispatch([request.name for request in requests], "reads", operation, deadline)

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self._topology.close()

    def _ask(
        self, names: Sequence[bytes], kind: Kind, deadline: Deadline, verb: bytes, *after: bytes
    ) -> list[bool]:
        """Send `verb name *after` for each name; whether each was answered by more than 0."""
        answers = [False] * len(names)

        def operation(stream: Stream, positions: Sequence[int]) -> None:
            # What a lookup costs: it asks for a prompt's blocks of all ranks.
            is_all = isinstance(positions, range)
            here = names if is_all else [names[position] for position in positions]
            commands = each_command(verb, here, *after)
            began = time.monotonic()
            stream.send([commands])
            done = 0
            while done < len(positions):
                some = _answers(stream, len(positions) - done if done else 1)
                if not done:
                    self._window.answered(time.monotonic() - began)
                if is_all:
                    answers[done : done + len(some)] = some
                else:
                    for position, answer in zip(positions[done:], some, strict=False):
                        answers[position] = answer
                done += len(some)

        self._dispatch(names, kind, operation, deadline)
        return answers

    def _dispatch(
        self, names: Sequence[bytes], kind: Kind, operation: Operation, deadline: Deadline
    ) -> None:
        if not names:
            return
        try:
            self._topology.dispatch(names, kind, operation, deadline)
        except FAILURES as error:
            # Not chained: a traceback would print what the server said, which `reason` masks.
            raise TierUnavailable(f"{self._url}: {reason(error)}") from None


def _topology(settings: ConnectionSettings, timeout: float) -> Topology:
    if settings.url.is_cluster:
        return Cluster(settings, timeout)
    service = settings.url.service
    return OneServer(settings) if service is None else Sentinels(settings, service)


def _answers(stream: Stream, most: int) -> list[bool]:
    """Read up to `most` answers, one at least."""
    try:
        return read_flags(stream, most)
    except ServerError as error:
        if error.code != "ASK":  # a name that left a slot which is moving counts as absent
            raise
        return [False]
