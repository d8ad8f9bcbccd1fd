"""The soak's faults: a server killed, hung and emptied, files damaged, a disk tier that is slow,
hangs, fails, is full or boasts, a process that gets no more descriptors or threads."""

from __future__ import annotations

import os
import random
import resource
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

from pydantic import PrivateAttr

from spec.offloading import StoreContext, StoreSpec
from tests.support.faulty_stores import Faults, FaultyStore, Pace, SlowStore
from tests.support.servers import RedisServer
from tiers.errors import TierFull
from tiers.store import TierStore

IO_VERBS = ("has", "put", "get", "drop", "clear")
"""The verbs that reach the device; `peek` and `touch` answer from memory."""
_DESCRIPTORS = resource.getrlimit(resource.RLIMIT_NOFILE)


def _no_thread(_: threading.Thread) -> None:
    """As in a container at its limit of processes. A new error each time: one that is raised again
    and again would keep all the frames that it went through."""
    raise RuntimeError("no new thread")


_NO_THREADS = patch.object(threading.Thread, "start", _no_thread)


class Mood:
    """The behaviour of a tier's stores; all of them share it."""

    def __init__(self, rng: random.Random) -> None:
        self.pace = Pace()
        self.faults = Faults()
        self._random = rng

    def turn(self, kind: str) -> None:
        """Be `slow`, `hanging`, `failing`, `full` or `boastful`; an empty kind ends all that."""
        self.pace.delay = self._slow if kind == "slow" else lambda verb, num_bytes: 0.0
        self.faults.heal()
        if kind == "hanging":
            self.pace.hang(*IO_VERBS)
        else:
            self.pace.resume()
        if kind == "failing":
            self.faults.fail(*IO_VERBS, error=OSError(5, "Input/output error"), chance=0.7)
        elif kind == "full":
            self.faults.fail("put", error=TierFull("no space"))
        elif kind == "boastful":
            self.faults.invented = 1.0

    def _slow(self, verb: str, num_bytes: int) -> float:
        return self._random.random() * 0.1 if verb in IO_VERBS else 0.0


class Sabotaged(StoreSpec):
    """A tier, `inner`, whose stores behave as `mood` says, in both halves of an engine."""

    verifies: ClassVar[bool] = True
    is_prompt: ClassVar[bool] = True

    inner: StoreSpec
    _mood: Mood = PrivateAttr(default_factory=lambda: Mood(random.Random(0)))

    @property
    def mood(self) -> Mood:
        """The behaviour of its stores."""
        return self._mood

    def open(self, site: StoreContext) -> TierStore:
        return FaultyStore(SlowStore(self.inner.open(site), self._mood.pace), self._mood.faults)


class SoakFault(NamedTuple):
    """Something that breaks, and its cure; None: it stays broken."""

    name: str
    inject: Callable[[], object]
    heal: Callable[[], object] | None


def all_faults(
    server: RedisServer, folder: Path, mood: Mood, rng: random.Random
) -> list[SoakFault]:
    """The faults of a chain with this disk tier's folder and mood, and this server."""
    moods = ("slow", "hanging", "failing", "full", "boastful")
    return [
        SoakFault("redis killed", server.kill, server.start),
        SoakFault("redis hung", server.hang, server.resume),
        SoakFault("redis emptied", lambda: _meddle(server, _empty, rng), None),
        SoakFault("redis values damaged", lambda: _meddle(server, _damage, rng), None),
        SoakFault("redis values replaced", lambda: _meddle(server, _replace, rng), None),
        SoakFault("slab bytes damaged", lambda: _damage_slabs(folder, rng), None),
        SoakFault("slab file cut", lambda: _cut_slabs(folder), None),
        *(
            SoakFault(f"disk {kind}", partial(mood.turn, kind), partial(mood.turn, ""))
            for kind in moods
        ),
        SoakFault("process without descriptors", _take_descriptors, _give_descriptors),
        SoakFault("process without threads", _NO_THREADS.start, _NO_THREADS.stop),
    ]


def _take_descriptors() -> None:
    """Let the process open nothing more: its limit is the lowest number that is free."""
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, _DESCRIPTORS[1]))


def _give_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, _DESCRIPTORS)


def _meddle(server: RedisServer, how: Callable[..., None], rng: random.Random) -> None:
    with server.client() as client:
        how(client, rng)


def _empty(client: Any, _: object) -> None:
    client.flushall()


def _some(client: Any, rng: random.Random) -> list[bytes]:
    keys = client.keys("*")
    return rng.sample(keys, len(keys) // 4)


def _damage(client: Any, rng: random.Random) -> None:
    for key in _some(client, rng):
        client.setrange(key, rng.randrange(900), rng.randbytes(3))


def _replace(client: Any, rng: random.Random) -> None:
    keys = _some(client, rng)
    for key, other in zip(keys, reversed(keys), strict=True):
        value = client.get(other)
        if value is not None:
            client.set(key, value)


def _damage_slabs(folder: Path, rng: random.Random) -> None:
    for slab in folder.glob("slab-*.dat"):
        with slab.open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            for _ in range(50 if size else 0):
                file.seek(rng.randrange(size))
                file.write(rng.randbytes(2))


def _cut_slabs(folder: Path) -> None:
    for slab in folder.glob("slab-*.dat"):
        os.truncate(slab, slab.stat().st_size // 2)
