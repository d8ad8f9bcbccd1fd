"""The slots' memory is this process's alone."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from tiers.errors import TierUnusable
from tiers.host import slot_memory
from tiers.host.slot_memory import SlotMemory
from tiers.host.spare_memory import reservable_memory


def test_a_child_does_not_get_the_slots() -> None:
    """A device would go on with the old page of a slot whose next write after a fork goes to a new
    one; and kernels that copy pinned pages in the fork would copy the whole pool."""
    memory = SlotMemory(4, 1 << 20, pin=False)
    memory.rows.fill_(7)
    mapping = f"{memory.rows.data_ptr():x}-"
    assert mapping in Path("/proc/self/maps").read_text()
    child = os.fork()
    if child == 0:
        os._exit(mapping in Path("/proc/self/maps").read_text())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (memory.rows == 7).all()
    memory.close()


SLOT = 1 << 20


def resident(memory: SlotMemory, size: int | None = None) -> int:
    """Bytes that the system has given of all that a memory may have, or of its first `size`. By
    pages, since its mapping may be one with its neighbour's."""
    rows = memory._all_rows
    size = rows.nbytes if size is None else size
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    address, length = ctypes.c_void_p(rows.data_ptr()), ctypes.c_size_t(size)
    assert libc.mincore(address, length, pages) == 0, ctypes.get_errno()
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.fixture
def growing() -> SlotMemory:
    return SlotMemory(64, SLOT, pin=False, reserve=256)


def test_memory_grows_in_place_and_what_is_given_back_is_free_again(growing: SlotMemory) -> None:
    address, before = growing.rows.data_ptr(), growing.rows
    growing.rows.fill_(7)
    growing.grow(256)
    assert growing.rows.data_ptr() == address and len(growing.rows) == 256
    assert (before == 7).all(), "copies in flight go on with the rows that they have"
    growing.rows.fill_(9)
    assert resident(growing) == 256 * SLOT
    while growing.shrink(100):
        pass
    assert 100 * SLOT <= resident(growing) < 104 * SLOT and len(growing.rows) == 100
    assert (growing.rows == 9).all()
    growing.grow(200)
    assert (growing.rows[:100] == 9).all() and not growing.rows[100:].any()
    with pytest.raises(TierUnusable, match="256MiB of addresses were set aside"):
        growing.grow(257)
    assert len(growing.rows) == 200


def test_a_child_gets_none_of_what_came_later(growing: SlotMemory) -> None:
    growing.grow(128)
    growing.rows.fill_(7)
    mapping = f"{growing.rows.data_ptr():x}-"
    child = os.fork()
    if child == 0:
        os._exit(mapping in Path("/proc/self/maps").read_text())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("limit", ["addresses", "overcommit"])
def test_addresses_that_are_limited_are_not_set_aside(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proc/sys/vm").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1024 kB\n")
    (tmp_path / "proc/sys/vm/overcommit_memory").write_text("1\n")
    assert reservable_memory(tmp_path) == 1 << 20
    if limit == "addresses":
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 40, 1 << 40))
    else:
        (tmp_path / "proc/sys/vm/overcommit_memory").write_text("2\n")
    assert reservable_memory(tmp_path) == 0


def test_pages_that_are_larger_than_what_slots_are_aligned_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels for aarch64 have pages of 64 KiB, and refuse advice for what begins inside of one.
    They are counted from the start of the slots here."""
    stride, page = 17 * 4096, 1 << 16
    memory = SlotMemory(1600, stride, pin=False, reserve=1600)
    start, advise = memory.rows.data_ptr(), slot_memory._madvise

    def madvise(address: int, size: int, advice: int) -> int:
        return -1 if (address - start) % page else advise(address, -(-size // page) * page, advice)

    large = SimpleNamespace(**vars(mmap) | {"PAGESIZE": page})
    monkeypatch.setattr(slot_memory, "mmap", large)
    monkeypatch.setattr(slot_memory, "_madvise", madvise)
    memory.rows.fill_(7)
    for slots in (101, 100):
        while memory.shrink(slots):
            pass
        assert slots * stride <= resident(memory) < slots * stride + page
        assert (memory.rows == 7).all()
    memory.grow(1600)
    assert (memory.rows[:100] == 7).all()
