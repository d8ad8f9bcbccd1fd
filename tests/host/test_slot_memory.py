"""The slots' memory is this process's alone."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from tests.support.clock import wait_for
from tiers.host.slot_memory import AHEAD, Prefault, SlotMemory


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


def resident(memory: SlotMemory) -> int:
    """Bytes of a memory's own mapping that the system has given."""
    start = f"{memory.rows.data_ptr():x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(start):
            rss = next(one for one in lines if one.startswith("Rss:"))
            return int(rss.split()[1]) << 10
    raise AssertionError("the mapping has no line of its own")


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
