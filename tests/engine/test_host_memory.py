"""Host memory is compared with what there is before any is taken."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spec.load import load_chain
from tests.support.replay import ReplayEngine
from tests.support.replay_chains import MODEL, chain_of, cpu, disk, measured
from tests.support.slow_store import LONG, ask
from tiers.connector.worker import host_slots, loading
from tiers.connector.worker.host_slots import HostSlots
from tiers.contract.engine_info import EngineInfo
from tiers.contract.pool_size import PoolSize
from tiers.errors import TierUnusable
from tiers.gpu.copier import CpuCopier
from tiers.host import slot_memory
from tiers.host.slot_memory import SlotMemory, register
from tiers.host.slots import slot_stride

MakeEngine = Callable[..., ReplayEngine]
MIB = 1 << 20
PAGESIZE = mmap.PAGESIZE


@pytest.fixture
def limited(tmp_path: Path) -> Path:
    """A system whose control group has 16 MiB left."""
    root = tmp_path / "root"
    for name, text in {
        "proc/meminfo": "MemAvailable: 99999999 kB\n",
        "proc/self/cgroup": "0::/pod\n",
        "sys/fs/cgroup/pod/memory.max": str(64 * MIB),
        "sys/fs/cgroup/pod/memory.current": str(48 * MIB),
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def unusable(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "unusable" in r.getMessage()]


@pytest.mark.fault
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_capacity_beyond_the_limit_is_refused_and_the_others_serve(
    engine: MakeEngine,
    tmp_path: Path,
    limited: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
) -> None:
    made_memory: list[int] = []

    def counting(slots: int, payload: int, *args: Any, **more: Any) -> SlotMemory:
        made_memory.append(slots * slot_stride(payload))
        return SlotMemory(slots, payload, *args, **more)

    monkeypatch.setattr(host_slots, "SlotMemory", counting)
    chain = chain_of(cpu(20 * MIB // 4096), disk(tmp_path / "disk"))
    made = engine(chain, num_blocks=120, prefix_caching=False, world_size=ranks, root=limited)
    for _ in range(2):
        made.generate(LONG, 2)
        made.settle()
    (line,) = unusable(caplog)
    assert "tier 'cpu' is unusable" in line and "16MiB can be had" in line
    assert "20.25MiB" in line and f"{ranks} rank(s)" in line
    assert sum(made_memory) < MIB
    assert measured(made, "loaded_blocks", "disk") > 0


def test_a_capacity_within_the_limit_serves(
    engine: MakeEngine, limited: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = engine(chain_of(cpu(10 * MIB // 4096)), num_blocks=120, root=limited)
    ask(made)
    assert not unusable(caplog)


def test_replicas_on_the_same_host_count(limited: Path) -> None:
    sizes = []
    for ranks in (1, 4):
        info = EngineInfo({}, 4, 4, num_blocks=8, ranks_here=ranks)
        slots = HostSlots(info, PoolSize(8 * MIB, 0, 0, 1), open_copier, limited)
        slots.open(MODEL.allocate(8))
        sizes.append((slots.handshake().slots, bool(slots.handshake().shortage)))
        slots.close()
    assert sizes == [(8 * MIB // 4096, False), (0, True)]


@pytest.mark.parametrize(("capacity", "fits"), [(10, True), (12, False)])
def test_a_rank_that_is_bound_to_a_node_takes_what_that_has(
    limited: Path, capacity: int, fits: bool
) -> None:
    """Of which each rank has one. The kernel would end it for more, though the host has that."""
    for name, text in {
        "sys/devices/system/node/node0/cpulist": "0",
        "sys/devices/system/node/node1/cpulist": "1",
        "sys/devices/system/node/node0/meminfo": f"Node 0 MemFree: {6 << 10} kB",
        "proc/self/status": "Mems_allowed_list:\t0-1\n",
        "proc/self/numa_maps": "55ce95a3c000 bind:0 file=python\n",
    }.items():
        (limited / name).parent.mkdir(parents=True, exist_ok=True)
        (limited / name).write_text(text)
    info = EngineInfo({}, 4, 4, num_blocks=8, world_size=2, ranks_here=2)
    slots = HostSlots(info, PoolSize(capacity * MIB, 0, 0, 2), open_copier, limited)
    slots.open(MODEL.allocate(8))
    assert len(slots.memory.rows) == (capacity * MIB // 2 // 4096 if fits else 0)
    assert fits or "12MiB can be had" in slots.handshake().shortage
    slots.close()


def open_copier(kv_caches: Any, num_blocks: int) -> CpuCopier:
    return CpuCopier(kv_caches, num_blocks)


def test_staging_that_no_memory_is_left_for_is_made_smaller_and_said(
    engine: MakeEngine, tmp_path: Path, limited: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain = load_chain({"version": 1, "tiers": [disk(tmp_path / "disk")], "staging": "32MiB"})
    ask(engine(chain, num_blocks=120, root=limited))
    assert "staging has only 0 slots" in caplog.text and "16MiB can be had" in caplog.text


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What was registered with a device that isn't there; steps are of 1 MiB, or a call's more."""
    ranges: list[tuple[int, int]] = []
    monkeypatch.setattr(slot_memory, "register", lambda *given: ranges.append(given))
    monkeypatch.setattr(slot_memory, "unregister", lambda address: None)
    monkeypatch.setattr(slot_memory, "STEP", MIB)
    monkeypatch.setattr(slot_memory, "SAY_SECONDS", 0.0)
    return ranges


@pytest.mark.parametrize("slots", [1, 3, 4, 10])
def test_a_call_pins_so_many_whole_slots(
    pinned: list[tuple[int, int]], slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drivers refuse to pin very much at once, and to copy from one such range into the next."""
    stride = slot_stride(PAGESIZE - 100)
    monkeypatch.setattr(slot_memory, "REGISTER_BYTES", 3 * stride + 5)
    assert slot_memory.pinned_together(stride) == 3
    memory = SlotMemory(slots, PAGESIZE - 100, pin=True)
    first = memory.rows.data_ptr()
    assert [address for address, _ in pinned] == [first + i * stride for i in range(0, slots, 3)]
    assert sum(size for _, size in pinned) == slots * stride
    assert all(size <= 3 * stride for _, size in pinned)
    unpinned: list[int] = []
    monkeypatch.setattr(slot_memory, "unregister", unpinned.append)
    memory.close()
    memory.close()
    assert sorted(unpinned) == [address for address, _ in pinned]


@pytest.mark.parametrize("pages", [1, 5, 16])
def test_no_two_calls_pin_one_page(
    pinned: list[tuple[int, int]], pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels for aarch64 have pages of 64 KiB; slots begin at multiples of 4 KiB."""
    large = SimpleNamespace(**vars(mmap) | {"PAGESIZE": 1 << 16})
    monkeypatch.setattr(slot_memory, "mmap", large)
    monkeypatch.setattr(slot_memory, "REGISTER_BYTES", 50 * 4096)
    memory = SlotMemory(100, pages * 4096, pin=True)
    first = memory.rows.data_ptr()
    assert len(pinned) > 1 and not any((start - first) % (1 << 16) for start, _ in pinned)
    assert sum(size for _, size in pinned) == 100 * pages * 4096
    memory.close()


def test_what_is_pinned_is_unpinned_when_the_rest_can_not_be(
    pinned: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges: list[int] = []

    def pin(address: int, size: int) -> None:
        if len(pinned) == 2:
            raise TierUnusable("no more")
        pinned.append((address, size))
        ranges.append(address)

    monkeypatch.setattr(slot_memory, "REGISTER_BYTES", PAGESIZE)
    monkeypatch.setattr(slot_memory, "register", pin)
    monkeypatch.setattr(slot_memory, "unregister", ranges.remove)
    with pytest.raises(TierUnusable, match="no more"):
        SlotMemory(4, PAGESIZE, pin=True)
    assert len(pinned) == 2 and not ranges


def test_pinning_goes_in_steps_and_says_how_far_it_is(
    pinned: list[tuple[int, int]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A driver takes a tenth of a second for each GiB, also of memory that is there."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(slot_memory, "REGISTER_BYTES", MIB)
    steps: list[int] = []
    memory = SlotMemory(5, MIB // 2, pin=True, check=steps.append)
    assert steps == [MIB, MIB, MIB // 2]
    assert [size for _, size in pinned] == [MIB, MIB, MIB // 2]
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "pinning 2.5MiB of host memory"
    assert said[1:7] == [
        f"pinning host memory: {done} of 2.5MiB are {what}"
        for done in ("1MiB", "2MiB", "2.5MiB")
        for what in ("provided", "pinned")
    ]
    assert "done after" in said[7]
    memory.close()


class Driver:
    """Pins memory, and refuses as a driver does: a range that is pinned in part, one of which
    nothing was pinned, and all from the moment on at which it has failed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranges: dict[int, int] = {}
        self.has_failed = False
        monkeypatch.setattr(slot_memory, "register", self._register)
        monkeypatch.setattr(slot_memory, "unregister", self._unregister)

    def _register(self, address: int, size: int) -> None:
        if self.has_failed or any(
            address < start + length and start < address + size
            for start, length in self.ranges.items()
        ):
            raise TierUnusable("CUDA error")
        self.ranges[address] = size

    def _unregister(self, address: int) -> None:
        if self.has_failed:
            raise TierUnusable("CUDA error")
        del self.ranges[address]

    def pieces(self, memory: SlotMemory) -> list[tuple[int, int]]:
        """First slot and number of slots of each range."""
        first, stride = memory.rows.data_ptr(), memory.rows.stride(0)
        found = self.ranges.items()
        return [((address - first) // stride, size // stride) for address, size in sorted(found)]


def test_pinned_memory_grows_and_shrinks_by_whole_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy ends where a piece does (`cuda.cross`), so that no piece may have a second border."""
    driver = Driver(monkeypatch)
    monkeypatch.setattr(slot_memory, "REGISTER_BYTES", 3 * PAGESIZE)
    memory = SlotMemory(4, PAGESIZE, pin=True, reserve=11)
    assert driver.pieces(memory) == [(0, 3), (3, 3)]
    memory.rows.fill_(7)
    memory.grow(11)
    assert driver.pieces(memory) == [(0, 3), (3, 3), (6, 3), (9, 2)]
    memory.rows[4:].fill_(8)
    while memory.shrink(5):
        pass
    assert driver.pieces(memory) == [(0, 3), (3, 3)]
    assert (memory.rows[:4] == 7).all() and (memory.rows[4] == 8).all()
    memory.grow(7)
    assert driver.pieces(memory) == [(0, 3), (3, 3), (6, 3)] and not memory.rows[6].any()
    memory.rows.fill_(9)
    driver.has_failed = True
    with pytest.raises(TierUnusable):
        memory.shrink(2)
    with pytest.raises(TierUnusable):
        memory.grow(11)
    memory.grow(7)
    assert (memory.rows == 9).all(), "what stays pinned is not given back under a device's copy"


def test_pinned_memory_without_room_to_grow_comes_back_in_the_same_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(monkeypatch)
    monkeypatch.setattr(slot_memory, "REGISTER_BYTES", 3 * PAGESIZE)
    memory = SlotMemory(8, PAGESIZE, pin=True)
    assert driver.pieces(memory) == [(0, 3), (3, 3), (6, 2)]
    while memory.shrink(4):
        pass
    assert driver.pieces(memory) == [(0, 3), (3, 3)]
    for slots in (7, 8):
        memory.grow(slots)
        assert driver.pieces(memory) == [(0, 3), (3, 3), (6, 2)]


def test_growth_that_fails_midway_leaves_what_was(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    monkeypatch.setattr(slot_memory, "REGISTER_BYTES", 3 * PAGESIZE)
    memory = SlotMemory(3, PAGESIZE, pin=True, reserve=12)
    memory.rows.fill_(7)
    driver.ranges[memory.rows.data_ptr() + 9 * PAGESIZE] = PAGESIZE
    with pytest.raises(TierUnusable):
        memory.grow(12)
    assert driver.pieces(memory) == [(0, 3), (9, 1)]
    assert len(memory.rows) == 3 and (memory.rows == 7).all()


def test_pinning_stops_when_the_memory_is_used_up_by_others(
    pinned: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(size: int) -> None:
        if len(steps) == 2:
            raise TierUnusable("used up")
        steps.append(size)

    steps: list[int] = []
    driver = Driver(monkeypatch)
    monkeypatch.setattr(slot_memory, "REGISTER_BYTES", MIB)
    with pytest.raises(TierUnusable):
        SlotMemory(5, MIB // 2, pin=True, check=check)
    assert steps == [MIB, MIB] and not driver.ranges


@pytest.mark.fault
@pytest.mark.parametrize(("code", "is_short"), [(801, False), (2, True)])
def test_a_driver_that_pins_nothing_is_told_from_too_little_memory(
    pinned: list[tuple[int, int]],
    limited: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    is_short: bool,
) -> None:
    """As under confidential computing, at whatever size: and without minutes of providing it."""
    steps: list[int] = []
    monkeypatch.setattr(HostSlots, "_check_step", lambda slots, size: steps.append(size))
    monkeypatch.setattr(slot_memory, "REGISTER_BYTES", MIB)
    monkeypatch.setattr(slot_memory, "register", register)
    driver = SimpleNamespace(cudaHostRegister=lambda address, size, flags: code)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch, "ones", lambda *given, device: None)
    size = PoolSize(12 * MIB, 2 * MIB, 0, 1, (("cpu", 12 * MIB),))
    slots = HostSlots(EngineInfo({}, 4, 4, num_blocks=8), size, OnDevice, limited)
    slots.open(MODEL.allocate(8))
    found = slots.handshake("cpu")
    assert steps == [MIB, MIB, MIB] and found.slots == 0
    assert "capacity 12MiB: " in found.shortage and f"CUDA error {code}" in found.shortage
    assert ("lower it" in found.shortage) == is_short
    slots.close()


class OnDevice(CpuCopier):
    """Its rows must be pinned."""

    pin = True


@pytest.mark.fault
@pytest.mark.parametrize("error", [TierUnusable("CUDA error 2"), OSError(12, "no memory")])
def test_a_tier_that_gets_no_memory_to_load_through_is_unusable_by_name(
    engine: MakeEngine,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    made_memory: list[SlotMemory] = []

    def second_fails(*args: Any, **more: Any) -> SlotMemory:
        if made_memory:
            raise error
        made_memory.append(SlotMemory(*args, **more))
        return made_memory[0]

    monkeypatch.setattr(loading, "SlotMemory", second_fails)
    made = engine(chain_of(cpu(400), disk(tmp_path / "disk")), num_blocks=120, prefix_caching=False)
    ask(made)
    ask(made)
    (line,) = unusable(caplog)
    assert "tier 'disk' is unusable" in line and str(error) in line
    assert measured(made, "loaded_blocks", "cpu") > 0


def test_memory_that_can_not_be_unpinned_keeps_nothing_else_from_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = SlotMemory(2, 4096, pin=False)
    memory._pinned = [memory.rows.data_ptr()]

    def fails(address: int) -> None:
        raise TierUnusable("CUDA error 700")

    monkeypatch.setattr(slot_memory, "unregister", fails)
    memory.close()
    memory.close()
