"""A worker's slots: one gather feeds all tiers, and a slot never passes for another block's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.clock import wait_for
from tests.support.kept import kept
from tiers.block import digest
from tiers.concurrency.rate_limit import RateLimit
from tiers.connector.worker.host_slots import HostSlots
from tiers.connector.worker.loading import Loading
from tiers.contract.engine_info import EngineInfo
from tiers.contract.messages import LoadItem, LoadJob, SlotMove, StoreItem
from tiers.contract.pool_size import PoolSize
from tiers.gpu.copier import open_copier

ENGINE = EngineInfo({"model": "m"}, block_tokens=4, hash_tokens=4, num_blocks=8)


OPENED: list[HostSlots] = []


@pytest.fixture(autouse=True)
def _closes_hosts() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


def opened(host: HostSlots, kv: torch.Tensor) -> HostSlots:
    host.open({"layer": kv})
    OPENED.append(host)
    return host


def host_with(kv: torch.Tensor, engine: EngineInfo = ENGINE) -> HostSlots:
    size = PoolSize(1 << 16, 0, 0, engine.world_size)
    return opened(HostSlots(engine, size, open_copier), kv)


def numbered() -> torch.Tensor:
    return torch.arange(8, dtype=torch.int64).unsqueeze(1).expand(8, 16).contiguous()


def test_tiers_share_what_the_first_of_them_gathers() -> None:
    host = host_with(numbered())
    host.gather([StoreItem(b"key3", 0, 3)])
    assert host.gather([StoreItem(b"key3", 0, None)]) is None
    assert host.wait_and_verify([0], [b"key3"]) == [True]
    assert host.memory.payload(0).cast("q")[0] == 3


def test_gathers_that_have_ended_are_forgotten() -> None:
    host = host_with(numbered())
    before = kept(host)
    host.gather([StoreItem(b"key3", 0, 3), StoreItem(b"key4", 1, 4)])
    assert kept(host) > before
    assert host.wait_and_verify([0, 1], [b"key3", b"key4"]) == [True, True]
    assert kept(host) == before + 2, "which key a slot has"
    assert host.wait_and_verify([0, 1], [b"key3", b"key4"]) == [True, True], "for the next tier"


def test_a_gather_that_failed_fails_for_every_tier() -> None:
    host = host_with(numbered())
    host.gather([StoreItem(b"key9", 0, 9)])
    for _ in range(2):
        with pytest.raises(IndexError, match="out of range"):
            host.wait_and_verify([0], [b"key9"])
    host.empty([0])
    host.filled([0], [b"key9"])
    assert host.wait_and_verify([0], [b"key9"]) == [True], "it is no gather's any more"


def test_a_slot_that_a_fill_failed_in_holds_nothing() -> None:
    host = host_with(numbered())
    host.gather([StoreItem(b"key3", 0, 3)])
    assert host.wait_and_verify([0], [b"key3"]) == [True]
    loading = Loading("disk", host, RateLimit(None), verify=False)
    loading.begin_fills([LoadJob(0, "", [LoadItem(b"key4", 0, None)])])
    wait_for(lambda: bool(loading.ended_fills(idle=True)))
    assert host.wait_and_verify([0, 0], [b"key3", b"key4"]) == [False, False]
    loading.close(1.0)


def test_what_all_tiers_share_goes_with_the_last_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    host = host_with(numbered())
    host.open({})
    closed: list[str] = []
    monkeypatch.setattr(host.copier, "close", lambda: closed.append("copier"))
    monkeypatch.setattr(host.memory, "close", lambda: closed.append("memory"))
    host.close()
    assert closed == []
    OPENED.pop().close()
    assert closed == ["copier", "memory"]


def test_a_slot_nobody_gathered_is_not_served() -> None:
    host = host_with(numbered())
    assert host.gather([StoreItem(b"key1", 2, None)]) is None
    assert host.wait_and_verify([2], [b"key1"]) == [False]


def test_a_slot_that_holds_another_key_is_not_served() -> None:
    host = host_with(numbered())
    host.gather([StoreItem(b"old", 1, 5)])
    host.gather([StoreItem(b"new", 1, 6)])
    assert host.wait_and_verify([1, 1], [b"old", b"new"]) == [False, True]
    assert host.memory.payload(1).cast("q")[0] == 6


def test_the_namespace_tells_ranks_facts_layouts_and_block_sizes_apart() -> None:
    base = vars(ENGINE)
    handshakes = [
        host_with(numbered()).shared_handshake(),
        host_with(
            numbered(), EngineInfo(**{**base, "rank": 1, "world_size": 2})
        ).shared_handshake(),
        host_with(numbered(), EngineInfo(**{**base, "world_size": 2})).shared_handshake(),
        host_with(numbered(), EngineInfo(**{**base, "facts": {"model": "n"}})).shared_handshake(),
        host_with(numbered(), EngineInfo(**{**base, "block_tokens": 8})).shared_handshake(),
        host_with(numbered().view(8, 4, 4)).shared_handshake(),
        host_with(numbered().view(torch.float64)).shared_handshake(),
    ]
    assert len({handshake.namespace for handshake in handshakes if handshake}) == len(handshakes)
    assert host_with(numbered()).shared_handshake() == handshakes[0]


def test_checksums_that_are_known_leave_no_future_behind() -> None:
    host = host_with(numbered())
    host.checksums.are_kept = True
    sizes = []
    for _ in range(2):
        for slot in range(8):
            host.gather([StoreItem(b"%d" % slot, slot, slot)])
            assert host.checksums.of([slot]) == [digest(host.memory.payload(slot))]
        sizes.append(kept(host))
    assert sizes[0] == sizes[1], "of millions of slots, futures of those in flight"
    host.gather([StoreItem(b"new", 0, 7)])
    assert host.checksums.of(range(8)) == [digest(host.memory.payload(slot)) for slot in range(8)]


def growing(tmp_path: Path, slots: int = 8) -> HostSlots:
    """Slots of a machine that has memory for 64; a chain with a tier named cpu."""
    for name, text in {
        "meminfo": "MemTotal: 256 kB\nMemAvailable: 256 kB\n",
        "self/cgroup": "0::/\n",
    }.items():
        (tmp_path / "proc" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc" / name).write_text(text)
    size = PoolSize(slots << 12, 0, 0, 1, (("cpu", slots << 12),))
    return opened(HostSlots(ENGINE, size, open_copier, tmp_path), numbered())


def settled(host: HostSlots) -> int:
    """How many slots there are, once what was begun on another thread has ended."""
    host.move([]).result()
    return len(host.memory.rows)


def test_slots_that_are_given_back_hold_no_block(tmp_path: Path) -> None:
    host = growing(tmp_path)
    host.checksums.are_kept = True
    host.gather([StoreItem(b"key%d" % slot, slot, slot) for slot in range(8)])
    assert host.wait_and_verify([7], [b"key7"]) == [True] and host.is_intact(7)
    assert host.prepare_resize("cpu", 4 << 12) == ""
    host.resize("cpu", 4 << 12)
    assert settled(host) == 8 and host.wait_and_verify([7], [b"key7"]) == [True], "for a load yet"
    before = kept(host)
    host.vacated(4, resizes=1)
    assert settled(host) == 4 and kept(host) < before
    assert host.wait_and_verify([3, 4, 7], [b"key3", b"key4", b"key7"]) == [True, False, False]
    assert not any(map(host.is_intact, range(4, 8)))
    assert host.checksums.of(range(4, 8)) == [None] * 4
    assert host.prepare_resize("cpu", 16 << 12) == ""
    host.resize("cpu", 16 << 12)
    assert settled(host) == 16 and host.wait_and_verify([7], [b"key7"]) == [False]
    host.close()


def test_a_worker_that_was_told_of_growth_gives_nothing_back_for_before(tmp_path: Path) -> None:
    host = growing(tmp_path)
    for slots in (4, 8):
        host.prepare_resize("cpu", slots << 12)
        host.resize("cpu", slots << 12)
    host.vacated(4, resizes=1)
    assert settled(host) == 8, "the scheduler hands them out by now"
    host.close()


def test_what_is_prepared_is_kept_until_it_is_had_or_aborted(tmp_path: Path) -> None:
    host = growing(tmp_path)
    host.prepare_resize("cpu", 4 << 12)
    host.resize("cpu", 4 << 12)
    host.prepare_resize("cpu", 6 << 12)
    host.vacated(4, resizes=1)
    assert settled(host) == 6
    host.abort_resize()
    assert settled(host) == 4
    host.prepare_resize("cpu", 12 << 12)
    host.abort_resize()
    assert settled(host) == 4
    host.close()


@pytest.mark.parametrize("looks", range(3))
@pytest.mark.parametrize("name", ["_kept", "_wanted"])
def test_what_a_change_has_taken_is_not_given_back_at_any_moment(
    tmp_path: Path, name: str, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in effect while memory of the one before is given back, on another thread."""
    host = growing(tmp_path)
    host.prepare_resize("cpu", 4 << 12)
    host.resize("cpu", 4 << 12)
    host.prepare_resize("cpu", 8 << 12)
    value: int = getattr(host, name)

    def look(host: HostSlots) -> int:
        nonlocal looks
        seen = value
        if threading.current_thread() is not threading.main_thread():
            looks -= 1
            if looks == -1:
                host.resize("cpu", 8 << 12)
        return seen

    def change(host: HostSlots, now: int) -> None:
        nonlocal value
        value = now

    monkeypatch.setattr(HostSlots, name, property(look, change), raising=False)
    host.vacated(4, resizes=1)
    assert settled(host) == 8
    host.close()


def test_what_there_is_no_memory_for_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    host = growing(tmp_path)
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 16 kB\n")
    assert "16KiB can be had" in host.prepare_resize("cpu", 40 << 12)
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 1024 kB\n")
    assert "256KiB of addresses were set aside" in host.prepare_resize("cpu", 65 << 12)
    assert settled(host) == 8
    assert host.prepare_resize("cpu", 40 << 12) == ""
    host.close()


def test_memory_that_slots_have_already_is_not_asked_for_again(tmp_path: Path) -> None:
    """It is taken when they are first filled, and given back with them."""
    host = growing(tmp_path)
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 16 kB\n")
    assert "16KiB can be had" in host.prepare_resize("cpu", 11 << 12)
    host.gather([StoreItem(b"key", 7, 0)])
    host.gather([StoreItem(b"other", 2, 1)])
    assert host.prepare_resize("cpu", 11 << 12) == ""
    host.abort_resize()
    host.prepare_resize("cpu", 4 << 12)
    host.resize("cpu", 4 << 12)
    host.vacated(4, resizes=1)
    assert settled(host) == 4
    assert "16KiB can be had" in host.prepare_resize("cpu", 8 << 12)
    assert host.prepare_resize("cpu", 7 << 12) == ""
    host.close()


def test_a_block_moves_with_its_bytes_its_key_and_its_checksum() -> None:
    host = host_with(numbered())
    host.checksums.are_kept = True
    host.gather([StoreItem(b"key%d" % slot, slot, slot) for slot in range(4)])
    assert all(host.checksums.of(range(4)))
    host.memory.payload(2)[0] ^= 1
    moves = [SlotMove(b"key3", 3, 0), SlotMove(b"key2", 2, 5), SlotMove(b"other", 1, 6)]
    assert host.move(moves).result().failed == {2}
    assert host.wait_and_verify([0, 0, 6], [b"key0", b"key3", b"other"]) == [False, True, False]
    assert host.memory.payload(0).cast("q")[0] == 3 and host.is_intact(0)
    assert not host.is_intact(5), "damage of before shows after it"
