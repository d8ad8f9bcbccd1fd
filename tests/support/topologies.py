"""A real Cluster, a real Sentinel, and a link to a server that misbehaves on demand."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import redis

from tests.support.fronts import Front
from tests.support.servers import START_LIMIT, RedisServer, binaries, free_port

SLOTS = 16384


def wait_until(ready: Callable[[], bool]) -> None:
    """Wait for another process to get somewhere; the limit only keeps a test from hanging."""
    deadline = time.monotonic() + START_LIMIT
    while True:
        with contextlib.suppress(redis.RedisError):
            if ready():
                return
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


def cluster_command(node: RedisServer, *words: object) -> Any:
    """What the node answers to a CLUSTER command."""
    client: Any = node.client()
    return client.execute_command("CLUSTER", *words)


def slots_of(number: int, masters: int) -> range:
    """The slots of one of that many masters."""
    return range(SLOTS * number // masters, SLOTS * (number + 1) // masters)


@contextlib.contextmanager
def cluster(
    masters: int = 3, announced: Sequence[int] = (), **options: str
) -> Iterator[list[RedisServer]]:
    """Masters that share the slots evenly and know each other.

    `announced`: the ports that the cluster's map names in place of their own.
    """
    ports = [{"cluster_announce_port": str(port)} for port in announced] or [{}] * masters
    with contextlib.ExitStack() as stack:
        nodes = [
            stack.enter_context(
                RedisServer(
                    binaries()["valkey"],
                    cluster_enabled="yes",
                    cluster_port=str(free_port()),
                    cluster_node_timeout="2000",
                    **announce,
                    **options,
                )
            )
            for announce in ports
        ]
        for number, node in enumerate(nodes):
            mine = slots_of(number, masters)
            cluster_command(node, "ADDSLOTSRANGE", mine[0], mine[-1])
            bus = node.client().config_get("cluster-port")["cluster-port"]
            cluster_command(nodes[0], "MEET", "127.0.0.1", node.port, bus)
        wait_until(lambda: all(_knows_all(node, masters) for node in nodes))
        yield nodes


@contextlib.contextmanager
def joined(nodes: Sequence[RedisServer], replica_of: RedisServer) -> Iterator[RedisServer]:
    """Another node of that cluster, which replicates one of its masters."""
    options = {"cluster_enabled": "yes", "cluster_node_timeout": "2000"}
    with RedisServer(binaries()["valkey"], cluster_port=str(free_port()), **options) as node:
        bus = nodes[0].client().config_get("cluster-port")["cluster-port"]
        cluster_command(node, "MEET", "127.0.0.1", nodes[0].port, bus)
        everybody = len(nodes) + 1
        wait_until(lambda: all(_knows_all(each, everybody) for each in (*nodes, node)))
        cluster_command(node, "REPLICATE", cluster_command(replica_of, "MYID"))
        wait_until(lambda: bool(node.client().info("replication")["master_link_status"] == "up"))
        yield node


def move_slot(
    nodes: Sequence[RedisServer], slot: int, source: RedisServer, target: RedisServer
) -> None:
    """Move a slot and its values while the cluster serves on, as a resharding does."""
    there = cluster_command(target, "MYID")
    cluster_command(target, "SETSLOT", slot, "IMPORTING", cluster_command(source, "MYID"))
    cluster_command(source, "SETSLOT", slot, "MIGRATING", there)
    client: Any = source.client()
    while found := cluster_command(source, "GETKEYSINSLOT", slot, 10):
        for key in found:
            client.execute_command("MIGRATE", "127.0.0.1", target.port, key, 0, 5000, "REPLACE")
    for node in (target, source, *nodes):
        cluster_command(node, "SETSLOT", slot, "NODE", there)


def _knows_all(node: RedisServer, masters: int) -> bool:
    said = cluster_command(node, "INFO").split()
    return b"cluster_state:ok" in said and b"cluster_known_nodes:%d" % masters in said


class Listening(Protocol):
    """What has a port of loopback."""

    port: int


class Sentinel:
    """One sentinel, enough to name a master and to appoint the next."""

    def __init__(self, master: Listening, service: str) -> None:
        self.port = free_port()
        self.service = service
        self._folder = Path(tempfile.mkdtemp(prefix="kvtiers-"))
        lines = [
            f"port {self.port}",
            "bind 127.0.0.1",
            f"dir {self._folder}",
            f"logfile {self._folder / 'log'}",
            f"sentinel monitor {service} 127.0.0.1 {master.port} 1",
            f"sentinel down-after-milliseconds {service} 300",
            f"sentinel failover-timeout {service} 3000",
        ]
        (self._folder / "config").write_text("\n".join(lines) + "\n")

    def client(self) -> Any:
        """A plain client of the sentinel."""
        return redis.Redis(port=self.port, protocol=2, decode_responses=True)

    def master_port(self) -> int:
        found = self.client().execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
        return int(found[1])

    def knows_a_replica(self) -> bool:
        return int(self.client().sentinel_master(self.service)["num-slaves"]) > 0

    def __enter__(self) -> Sentinel:
        binary = binaries()["valkey"]
        self._process = subprocess.Popen([binary, self._folder / "config", "--sentinel"])
        wait_until(lambda: self.master_port() > 0)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class Link(Front):
    """Passes bytes between clients and a server, until told to do it badly.

    `drip`: seconds between single bytes of what the server says; `rate`: how many bytes of it pass
    in a second; `cut_after` and `stall_after`: how many still pass before the connection is closed,
    or stays silent. `passed`: how many have.
    """

    def __init__(self, server: RedisServer) -> None:
        super().__init__()
        self._server = server
        self.drip: float | None = None
        self.rate: float | None = None
        self.passed = 0
        self.cut_after: int | None = None
        self.stall_after: int | None = None
        # Without it a stalled reply that is passed meanwhile could undo what `heal` does.
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def heal(self) -> None:
        """Pass everything again, on new connections too."""
        with self._lock:
            self.drip = self.rate = self.cut_after = self.stall_after = None

    def serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self._server.port))
        except OSError:
            client.close()
            return
        self._sockets.append(server)
        threading.Thread(target=self._ask, args=(client, server), daemon=True).start()
        self._answer(client, server)

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)

    def _answer(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                self.passed += len(data)
                if self.rate is not None:
                    time.sleep(len(data) / self.rate)
                if self.drip is not None:
                    for byte in data:
                        client.sendall(bytes([byte]))
                        time.sleep(self.drip or 0)
                elif self.cut_after is not None and len(data) > self.cut_after:
                    client.sendall(data[: self.cut_after])
                    client.shutdown(socket.SHUT_RDWR)
                    return
                else:
                    client.sendall(data[: self._passing(len(data))])
            client.shutdown(socket.SHUT_RDWR)

    def _passing(self, size: int) -> int:
        """How many of the next `size` bytes pass before the connection stalls."""
        with self._lock:
            if self.stall_after is None:
                return size
            passing = min(size, self.stall_after)
            self.stall_after -= passing
            return passing
