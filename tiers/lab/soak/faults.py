"""The soak's faults: a server killed, hung and emptied, files damaged, a disk that misbehaves."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from signal import SIGCONT, SIGSTOP, Signals
from typing import Any, NamedTuple

import redis

from tiers.errors import KVTiersError
from tiers.lab.soak.sabotage import Mood

START_SECONDS = 30.0


class NoServer(KVTiersError):
    """The Redis server of the soak does not start."""


class Server:
    """A Valkey of the soak's own, on loopback; data goes when it is killed."""

    def __init__(self, binary: str, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        options = {"port": str(self.port), "bind": "127.0.0.1", "save": "", "dir": str(folder)}
        options |= {"maxmemory": "16mb", "maxmemory-policy": "allkeys-lru"}
        self._command = [binary, *(part for k, v in options.items() for part in (f"--{k}", v))]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it listens. Raises NoServer."""
        if self._process is not None:
            return
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise NoServer(f"{self._command[0]} does not start")

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def send(self, signum: Signals) -> None:
        """Send it a signal, if it runs."""
        if self._process is not None:
            self._process.send_signal(signum)


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
    client = redis.Redis(port=server.port, socket_timeout=0.5, protocol=2)
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
