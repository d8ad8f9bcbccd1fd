"""Memory is there before it is used, and what it holds is never changed."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from tests.support.clock import wait_for
from tiers.host.prefault import AHEAD, Prefault
from tiers.host.slot_memory import SlotMemory

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
