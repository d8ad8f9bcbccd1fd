"""The slots' memory is this process's alone."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.clock import wait_for
from tiers.errors import TierUnusable
from tiers.host import slot_memory
from tiers.host.slot_memory import AHEAD, Prefault, SlotMemory
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
def memory() -> SlotMemory:
    return SlotMemory((AHEAD >> 20) + 64, SLOT, pin=False)


def wait_until_given(prefault: Prefault, done: int) -> None:
    wait_for(lambda: prefault.done >= done or not prefault._thread.is_alive())
    if prefault.done < done:
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")


def test_pages_are_given_ahead_of_use_and_no_further(memory: SlotMemory) -> None:
    prefault = Prefault(memory.rows.data_ptr(), memory.rows.shape[0] * SLOT)
    wait_until_given(prefault, AHEAD)
    assert AHEAD <= resident(memory) < memory.rows.shape[0] * SLOT
    prefault.used(64 * SLOT)
    wait_until_given(prefault, AHEAD + 64 * SLOT)
    prefault.close()
    prefault.close()


def test_what_was_written_stays(memory: SlotMemory) -> None:
    prefault = Prefault(memory.rows.data_ptr(), memory.rows.shape[0] * SLOT)
    for slot in range(memory.rows.shape[0]):
        memory.payload(slot)[:] = bytes([slot % 251]) * SLOT
        prefault.used((slot + 1) * SLOT)
    prefault.close()
    assert all(
        memory.payload(slot)[:: mmap.PAGESIZE].tobytes()
        == bytes([slot % 251]) * (SLOT // mmap.PAGESIZE)
        for slot in range(memory.rows.shape[0])
    )


def test_closing_does_not_wait_for_the_rest() -> None:
    large = SlotMemory(8 << 10, SLOT, pin=False)
    prefault = Prefault(large.rows.data_ptr(), large.rows.shape[0] * SLOT)
    prefault.used(4 << 30)
    prefault.close()
    assert prefault.done < 4 << 30


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


def test_pages_that_were_given_back_are_provided_anew() -> None:
    memory = SlotMemory(64, SLOT, pin=False, reserve=64)
    prefault = Prefault(memory.rows.data_ptr(), memory.rows.nbytes)
    wait_until_given(prefault, 64 * SLOT)
    prefault.resize(16 * SLOT)
    while memory.shrink(16):
        pass
    assert prefault.done == 16 * SLOT <= resident(memory) < 20 * SLOT
    memory.grow(64)
    prefault.resize(64 * SLOT)
    prefault.used(17 * SLOT)
    wait_until_given(prefault, 64 * SLOT)
    assert resident(memory) == 64 * SLOT
    prefault.close()


def test_a_range_that_is_cut_while_it_is_used_is_provided_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its thread would ask for the nothing that is left, again and again."""
    memory = SlotMemory(8, SLOT, pin=False)
    asked: list[int] = []

    def madvise(address: int, size: int, advice: int) -> int:
        asked.append(size)
        return 0

    monkeypatch.setattr(slot_memory, "_madvise", madvise)
    prefault = Prefault(memory.rows.data_ptr(), 8 * SLOT)
    wait_until_given(prefault, 8 * SLOT)
    prefault.resize(2 * SLOT)
    prefault.resize(8 * SLOT)

    class Cut(threading.Condition):
        """Others cut the range before a use has the lock."""

        def __enter__(self) -> bool:
            prefault._changed = changed
            prefault.resize(4 * SLOT)
            return changed.__enter__()

        def __exit__(self, *args: Any) -> None:
            return changed.__exit__(*args)

    changed, prefault._changed = prefault._changed, Cut()
    prefault.used(2 * SLOT)
    wait_until_given(prefault, 4 * SLOT)
    assert prefault._wanted == 4 * SLOT
    prefault.close()
    assert min(asked) > 0


def test_a_range_that_is_cut_while_it_is_provided_is_provided_anew_behind_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is given back is there no more, though the call that provided it ends afterwards."""
    memory, may_provide = SlotMemory(8, SLOT, pin=False), threading.Event()
    provided: list[tuple[int, int]] = []

    def madvise(address: int, size: int, advice: int) -> int:
        if not provided:
            assert may_provide.wait(60)
            prefault.resize(SLOT)
        provided.append((address - memory.address(0), size))
        return 0

    monkeypatch.setattr(slot_memory, "_madvise", madvise)
    prefault = Prefault(memory.rows.data_ptr(), 8 * SLOT)
    may_provide.set()
    wait_until_given(prefault, SLOT)
    prefault.resize(8 * SLOT)
    prefault.used(2 * SLOT)
    wait_until_given(prefault, 8 * SLOT)
    assert provided == [(0, 4 * SLOT), (SLOT, 4 * SLOT), (5 * SLOT, 3 * SLOT)]
    prefault.close()


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
    prefault = Prefault(start, 101 * stride)
    wait_until_given(prefault, 101 * stride)
    prefault.resize(1600 * stride)
    prefault.used(1600 * stride)
    wait_for(lambda: prefault.done == 1600 * stride)
    prefault.close()
    assert resident(memory) == 1600 * stride and (memory.rows[:100] == 7).all()
