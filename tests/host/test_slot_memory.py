"""The slots' memory is this process's alone."""

from __future__ import annotations

import os
from pathlib import Path

from tiers.host.slot_memory import SlotMemory


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
