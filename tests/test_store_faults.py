"""Faults that disk and Redis have in common, as tables: what a tier makes of them is the same.

Faults of one kind of store are in its own room. The times only keep a broken build from hanging.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from spec.offloading import StoreContext, StoreSpec
from tests.disk.audit import audit, handles_of
from tests.support.damage import ServerMedium, SlabMedium
from tests.support.servers import RedisServer, binaries
from tests.support.topologies import Link, wait_until
from tiers.block import HEADER_BYTES
from tiers.disk import slab
from tiers.disk.disk_store import DiskStore
from tiers.disk.folder import folder, owner
from tiers.disk.slab import PAGE
from tiers.disk.spec import DiskSpec
from tiers.errors import TierFull, TierNotOpen, TierUnavailable
from tiers.remote.redis.pipeline import TOGETHER_BYTES
from tiers.remote.redis.redis_store import RedisStore
from tiers.remote.spec import RedisSpec
from tiers.store import TierStore
from tiers.testing import Memory, make_key
from tiers.testing.harness import Medium
from tiers.wrappers import reopening
from tiers.wrappers.guard import Guarded
from tiers.wrappers.opening import open_guarded

PAYLOAD = 65536
HANG_LIMIT = 20.0


def put(store: TierStore, *keys: bytes, size: int = PAYLOAD) -> list[bool]:
    return store.put(Memory(keys, size).fill().blocks)


def get(store: TierStore, *keys: bytes, size: int = PAYLOAD) -> list[bool]:
    """Load; every hit must be what was stored, and no other memory is touched."""
    memory = Memory(keys, size)
    hits = store.get(memory.blocks)
    assert all(memory.holds(index) for index, hit in enumerate(hits) if hit)
    memory.check_canaries()
    return hits


# ---- damage to what is stored


class Kept(NamedTuple):
    """An open store, the bytes that it keeps, and where a payload begins in those of a block."""

    spec: StoreSpec
    store: DiskStore | RedisStore
    medium: Medium
    start: int
    piece: int
    size: int = PAYLOAD


DISKS = {"buffered": ("buffered", 8 << 20), "direct": ("direct", 8 << 20)}
DISKS |= {"in pieces": ("buffered", 2 * PAGE), "direct in pieces": ("direct", 2 * PAGE)}
SERVERS = {"plain": ("none", PAYLOAD), "zstd": ("zstd", PAYLOAD)}
LARGE = 5 * TOGETHER_BYTES + 4096
SERVERS |= {"in pieces": ("none", LARGE), "zstd in pieces": ("zstd", LARGE)}


@pytest.fixture(params=[f"disk {how}" for how in DISKS] + [f"redis {how}" for how in SERVERS])
def kept(
    request: pytest.FixtureRequest,
    shared_server: RedisServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Kept]:
    kind, _, how = request.param.partition(" ")
    if kind == "disk":
        io, piece = DISKS[how]
        monkeypatch.setattr(slab, "_PIECE", piece)
        on_disk = DiskSpec.model_validate({"path": tmp_path, "capacity": "8MiB", "io": io})
        with closing(on_disk.open(StoreContext(PAYLOAD))) as store:
            yield Kept(on_disk, store, SlabMedium(tmp_path), HEADER_BYTES, 2 * PAGE)
        return
    codec, size = SERVERS[how]
    url = shared_server.url
    on_server = RedisSpec.model_validate({"url": url, "timeout": "10s", "codec": codec})
    with closing(on_server.open(StoreContext(size))) as remote:
        yield Kept(on_server, remote, ServerMedium(url), HEADER_BYTES, TOGETHER_BYTES, size)


Damage = Callable[[bytes, bytes], bytes]
"""What comes to be in the place of a block's bytes, given these and another block's."""


def flip(place: int) -> Damage:
    """A bit at this place, or the last."""

    def damage(data: bytes, _: bytes) -> bytes:
        at = min(place, len(data) - 1)
        return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]

    return damage


def cut(length: int) -> Damage:
    return lambda data, _: data[:length]


def flips(kept: Kept) -> list[Damage]:
    start, piece = kept.start, kept.piece
    inside = (start, start + piece - 1, start + piece, start + 3 * piece, start + PAYLOAD // 2)
    places = (0, 9, 20, 40, 100, 500, HEADER_BYTES - 1, *inside, start + kept.size)
    return [flip(place) for place in places]


def cuts(kept: Kept) -> list[Damage]:
    lengths = (0, 1, HEADER_BYTES - 1, HEADER_BYTES, kept.start + 100)
    return [cut(length) for length in lengths]


def exchange(_: Kept) -> list[Damage]:
    return [lambda _, other: other]


DAMAGES = [
    pytest.param(flips, id="a flipped bit anywhere in a record"),
    pytest.param(cuts, id="a record cut short"),
    pytest.param(exchange, id="a record in another block's place"),
]


@pytest.mark.fault
@pytest.mark.parametrize("damages", DAMAGES)
def test_a_damaged_block_is_a_miss_and_goes(
    kept: Kept, damages: Callable[[Kept], list[Damage]]
) -> None:
    store, medium, size = kept.store, kept.medium, kept.size
    before, after = make_key(), make_key()
    assert put(store, before, after, size=size) == [True, True]
    for count, damage in enumerate(damages(kept), 1):
        bad = make_key()
        put(store, bad, size=size)
        medium.write(bad, damage(medium.read(bad), medium.read(after)))
        assert get(store, before, bad, after, size=size) == [True, False, True], count
        assert store.has([before, bad, after]) == [True, False, True]
        assert store.damaged() == count
        if isinstance(store, DiskStore):
            assert store.peek([before, bad, after]) == [True, False, True]
            audit(store)
        assert put(store, bad, size=size) == [True]
        assert get(store, bad, size=size) == [True]
        store.drop([bad])
    store.drop([before, after])


# ---- a store that can't be reached


class Broken(NamedTuple):
    """A tier over something real, which `begin` breaks and `end` mends."""

    spec: StoreSpec
    begin: Callable[[], object]
    end: Callable[[], object]


class Place(NamedTuple):
    """What a test may break."""

    server: RedisServer
    folder: Path
    patch: pytest.MonkeyPatch
    stack: ExitStack


@pytest.fixture
def place(server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(server, tmp_path, monkeypatch, stack)


def over(url: str, timeout: str = "400ms") -> RedisSpec:
    return RedisSpec.model_validate({"url": url, "timeout": timeout})


def killed(place: Place, url: str = "url") -> Broken:
    return Broken(over(getattr(place.server, url)), place.server.kill, place.server.start)


def killed_socket(place: Place) -> Broken:
    return killed(place, "unix_url")


def hung(place: Place) -> Broken:
    server = place.server
    return Broken(over(server.url), server.hang, server.resume)


def on_link(place: Place, **fault: float) -> Broken:
    link = place.stack.enter_context(Link(place.server))
    return Broken(over(link.url), lambda: vars(link).update(fault), link.heal)


def drips(place: Place) -> Broken:
    return on_link(place, drip=0.05)


def breaks_off(place: Place) -> Broken:
    return on_link(place, cut_after=0)


def silent(place: Place) -> Broken:
    return on_link(place, stall_after=0)


def unreadable(place: Place) -> Broken:
    """The device fails: each read and write of the slab's own handle does, with EIO."""
    path = place.folder
    kept: dict[int, int] = {}

    def begin() -> None:
        broken = os.open("/proc/self/mem", os.O_RDWR)  # which has nothing where a slab has slots
        for handle in handles_of(path, "slab-*"):
            kept[handle] = os.dup(handle)
            os.dup2(broken, handle)
        os.close(broken)
        assert kept

    def end() -> None:
        for handle, good in kept.items():
            os.dup2(good, handle)
            os.close(good)

    return Broken(DiskSpec(path=path, capacity=64 * PAYLOAD), begin, end)


def paused(place: Place) -> Broken:
    server = place.server
    return Broken(over(server.url), lambda: server.client().client_pause(PASSES_MS), lambda: None)


def busy(place: Place) -> Broken:
    server = place.server
    server.kill()
    server.set_option("enable-debug-command", "yes")
    server.start()

    def begin() -> None:
        words = ("DEBUG", "SLEEP", PASSES_MS / 1000)
        threading.Thread(target=server.client().execute_command, args=words).start()
        wait_until(lambda: is_silent(server))

    return Broken(over(server.url), begin, lambda: None)


def is_silent(server: RedisServer) -> bool:
    with closing(socket.create_connection(("127.0.0.1", server.port), 0.2)) as asked:
        try:
            asked.sendall(b"PING\r\n")
            return not asked.recv(1)
        except TimeoutError:
            return True


def another_password(place: Place) -> Broken:
    server = place.server

    def change(password: str) -> None:
        client = server.client()
        client.config_set("requirepass", password)
        client.client_kill_filter(_type="normal", skipme=True)
        server.password = password or None

    return Broken(over(server.url), lambda: change("another"), lambda: change(""))


PASSES_MS = 4000
OUTAGES = [
    pytest.param(killed, id="killed server"),
    pytest.param(killed_socket, id="killed server, over a unix socket"),
    pytest.param(hung, id="hung server (SIGSTOP)"),
    pytest.param(paused, id="paused server (CLIENT PAUSE)"),
    pytest.param(busy, id="busy server (DEBUG SLEEP)"),
    pytest.param(drips, id="replies that drip (a byte in 50 ms)"),
    pytest.param(breaks_off, id="connections that break off"),
    pytest.param(silent, id="replies that never come"),
    pytest.param(another_password, id="a password that changes"),
    pytest.param(unreadable, id="every slab read and write fails"),
]


def holds(store: TierStore, *keys: bytes) -> bool:
    """Whether it has them all; a server may still be at what nobody waits for any more."""
    with suppress(TierUnavailable):
        return all(get(store, *keys))
    return False


def more(count: int) -> list[bytes]:
    return [make_key() for _ in range(count)]


def unavailable(verb: Callable[[], object]) -> bool:
    """Whether the verb ends and says that its store is not there."""
    with pytest.raises((TierUnavailable, TierFull)):
        verb()
    return True


@pytest.mark.fault
@pytest.mark.parametrize("fault", OUTAGES)
def test_an_outage_costs_misses_shows_and_passes(
    fault: Callable[[Place], Broken], place: Place
) -> None:
    """Each verb of the store ends, and says that it is unavailable; its guard makes it a miss."""
    keys = [make_key() for _ in range(20)]
    broken = fault(place)
    with opened(broken.spec) as store, guarded(broken.spec) as tier, ThreadPoolExecutor(5) as aside:
        wait_until(lambda: put(tier, *keys) == [True] * 20 == put(store, *keys))
        broken.begin()
        calls = aside.submit(get, tier, *keys[10:]), aside.submit(put, tier, make_key())
        assert not any(any(call.result(HANG_LIMIT)) for call in calls)
        assert not any(aside.submit(tier.has, keys).result(HANG_LIMIT))
        assert not (tier.health.reads_up or tier.health.writes_up)
        # A failed device may say that it is full, so a put evicts: fewer than the get asks for.
        verbs = [lambda: get(store, *keys[:10]), lambda: put(store, *more(5))]
        if isinstance(store, RedisStore):  # a disk's index works meanwhile
            late = place.stack.enter_context(opened(broken.spec))  # connects only now
            verbs += [lambda: store.has(keys), lambda: late.has(keys)]
            verbs += [lambda: store.drop(more(20))]  # type: ignore[list-item,return-value]
        asked = [aside.submit(unavailable, verb) for verb in verbs]
        assert all(one.result(HANG_LIMIT) for one in asked)
        broken.end()
        wait_until(lambda: put(tier, *keys) == [True] * 20)
        wait_until(lambda: get(tier, *keys) == [True] * 20)
        assert tier.health.reads_up and tier.health.writes_up
        wait_until(lambda: holds(store, *keys))
        if isinstance(store, DiskStore):
            audit(store)


@contextmanager
def opened(spec: StoreSpec) -> Iterator[TierStore]:
    with closing(spec.open(StoreContext(PAYLOAD))) as store:
        yield store


@contextmanager
def guarded(spec: StoreSpec) -> Iterator[Guarded]:
    store = spec.open(StoreContext(PAYLOAD))
    with closing(Guarded(store, "tier", retry_after=0.1, retry_after_max=0.2)) as tier:
        yield tier


# ---- a store that is not there at the start


def down(place: Place) -> Broken:
    server = RedisServer(binaries()["valkey"])
    place.stack.callback(server.close)
    return Broken(over(server.url, "5s"), lambda: None, server.start)


def locked(place: Place) -> Broken:
    """Another process is stopped, or hangs, while it opens or closes the tier."""
    path, patch = place.folder, place.patch
    patch.setattr(folder, "LOCK_SECONDS", 0.5)
    spec = DiskSpec(path=path, capacity=8 * PAYLOAD)
    spec.open(StoreContext(PAYLOAD)).close()
    held = os.open(path / "lock", os.O_RDWR)
    return Broken(spec, lambda: fcntl.flock(held, fcntl.LOCK_EX), lambda: os.close(held))


def no_device(place: Place) -> Broken:
    path, patch = place.folder, place.patch

    def broken(_: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    spec = DiskSpec(path=path, capacity=8 * PAYLOAD)
    return Broken(spec, lambda: patch.setattr(owner, "sync_folder", broken), patch.undo)


ABSENCES = [
    pytest.param((down, ""), id="server down at start"),
    pytest.param(
        (locked, "another process has been opening or closing"),
        id="a process that is stopped, or hangs, while it opens the tier",
    ),
    pytest.param(
        (no_device, "Input/output error"), id="an error of the device while the tier is opened"
    ),
]


@pytest.mark.fault
@pytest.mark.parametrize("absence", ABSENCES)
def test_a_tier_that_can_t_be_had_at_the_start_joins_later(
    absence: tuple[Callable[[Place], Broken], str], place: Place
) -> None:
    fault, says = absence
    key, broken = make_key(), fault(place)
    place.patch.setattr(reopening, "RETRY_AFTER", 0.1)
    broken.begin()
    if says:  # else opening connects to nothing
        handles = len(os.listdir("/proc/self/fd"))
        with pytest.raises(TierNotOpen, match=says):
            broken.spec.open(StoreContext(PAYLOAD))
        assert len(os.listdir("/proc/self/fd")) == handles
    with closing(open_guarded(broken.spec, StoreContext(PAYLOAD))) as tier:
        assert tier.has([key]) == [False] == put(tier, key)
        broken.end()
        wait_until(lambda: put(tier, key) == [True])
        assert get(tier, key) == [True]


# ---- others that use the same place


@pytest.mark.fault
@pytest.mark.parametrize("kept", ["disk buffered", "redis plain"], indirect=True)
def test_what_goes_between_has_and_get_is_a_miss(kept: Kept) -> None:
    keys = [make_key() for _ in range(5)]
    with opened(kept.spec) as other:
        put(kept.store, *keys)
        assert all(kept.store.has(keys))
        other.drop([keys[1], keys[4]])
        assert get(kept.store, *keys) == [True, False, True, True, False]
        assert kept.store.damaged() == 0
        other.drop(keys)
