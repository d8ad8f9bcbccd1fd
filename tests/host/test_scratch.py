"""Memory that threads borrow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tiers.block import address_of
from tiers.host.scratch import HUGE, LARGE, Scratch


def flags_at(address: int) -> list[str]:
    """What the kernel was told of the mapping at an address."""
    found = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_it = int(span[1], 16) <= address < int(span[2], 16)
        elif is_it and line.startswith("VmFlags:"):
            found = line
    return found.split()


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="there are no huge pages"
)
@pytest.mark.parametrize("size", [LARGE, HUGE, HUGE + 4096])
def test_large_memory_is_asked_for_as_huge_pages(size: int) -> None:
    with Scratch(size).borrow() as memory:
        assert len(memory) == size
        assert address_of(memory) % HUGE == 0 and "hg" in flags_at(address_of(memory))
        memory[-1] = 1


def test_what_came_back_is_lent_again() -> None:
    scratch = Scratch(4096)
    with scratch.borrow() as first, scratch.borrow() as second:
        places = {address_of(first), address_of(second)}
        assert len(places) == 2 and not any(place % 4096 for place in places)
    with scratch.borrow() as again:
        assert address_of(again) in places
