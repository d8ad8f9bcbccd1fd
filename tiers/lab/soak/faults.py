"""The soak's faults: a server killed, hung and emptied, files damaged, a disk that misbehaves."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any, NamedTuple

import redis

from tiers.lab.server import Server
from tiers.lab.soak.sabotage import Mood


class Fault(NamedTuple):
    """Something that breaks, and how it is mended; None: it stays broken."""

    name: str
    inject: Callable[[], None]
    heal: Callable[[], None] | None


def all_faults(server: Server, folder: Path, mood: Mood, rng: random.Random) -> list[Fault]:
    """The faults of a chain with this disk tier's folder and mood, and this server."""
    moods = ("slow", "hanging", "failing", "full", "boastful")
    return [
        Fault("redis killed", server.kill, server.start),
        Fault("redis hung", partial(server.send, SIGSTOP), partial(server.send, SIGCONT)),
        Fault("redis emptied", lambda: _meddle(server, _empty, rng), None),
        Fault("redis values damaged", lambda: _meddle(server, _damage, rng), None),
        Fault("redis values replaced", lambda: _meddle(server, _replace, rng), None),
        Fault("slab bytes damaged", lambda: _damage_slabs(folder, rng), None),
        Fault("slab file cut", lambda: _cut_slabs(folder), None),
        *(
            Fault(f"disk {kind}", partial(mood.turn, kind), partial(mood.turn, ""))
            for kind in moods
        ),
    ]


def _meddle(server: Server, how: Callable[..., None], rng: random.Random) -> None:
    client = server.client(timeout=0.5)
    try:
        how(client, rng)
    except redis.RedisError:
        pass  # another fault has it down or hung
    finally:
        client.close()


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
