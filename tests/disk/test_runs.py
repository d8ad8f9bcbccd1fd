"""Small blocks whose slots are in a row are moved by one call, and fail each by itself."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.disk.audit import audit, folder_of, keys, open_disk, opened, put, slab_path
from tests.disk.audit import get as get_blocks
from tiers.block import HEADER_BYTES
from tiers.disk import slab as slab_files
from tiers.disk.index.edit import index_key
from tiers.disk.slab import PAGE, slot_bytes
from tiers.host.slot_memory import SlotMemory
from tiers.store import Block
from tiers.testing import payload_of

pytestmark = pytest.mark.usefixtures("mode")

PAYLOAD = 8 * PAGE
SLOT = slot_bytes(PAYLOAD)


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """The lengths that calls of this function of `os` move."""
    real: Callable[..., int] = getattr(os, name)
    found: list[int] = []

    def call(handle: int, parts: Sequence[memoryview], offset: int) -> int:
        found.append(sum(map(len, parts)))
        return real(handle, parts, offset)

    monkeypatch.setattr(os, name, call)
    return found


def blocks_of(wanted: Sequence[bytes], memory: SlotMemory, is_filled: bool) -> list[Block]:
    """Blocks on pages, as those of the host pool are."""
    made = [Block(key, memory.payload(place)) for place, key in enumerate(wanted)]
    for block in made:
        block.payload[:] = payload_of(block.key, PAYLOAD) if is_filled else bytes(PAYLOAD)
    return made


def test_slots_in_a_row_are_moved_by_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrote, read = counted(monkeypatch, "pwritev"), counted(monkeypatch, "preadv")
    memory = SlotMemory(8, PAYLOAD, pin=False)
    store = open_disk(tmp_path, slots=32, payload=PAYLOAD)
    wanted = keys(*range(8))
    assert all(store.put(blocks_of(wanted, memory, is_filled=True)))
    found = blocks_of(wanted[::-1], memory, is_filled=False)
    assert all(store.get(found))
    assert all(bytes(payload) == payload_of(key, PAYLOAD) for key, payload in found)
    assert wrote == read == [8 * SLOT]
    store.close()
    memory.close()


@pytest.mark.parametrize("most", [1, 3, 64])
def test_any_set_of_slots_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Also of blocks that are not on pages, in runs of any length, and of several lengths."""
    monkeypatch.setattr(slab_files, "_MOST", most)
    with opened(tmp_path, slots=64) as store:
        for payload in (PAYLOAD, PAYLOAD - 1):  # their slots have one length
            wanted = [key + bytes([payload % 2]) for key in keys(*range(12))]
            assert all(put(store, wanted, payload))
            store.drop([wanted[3], wanted[4], wanted[9]])
            assert get_blocks(store, wanted, payload) == [
                number not in (3, 4, 9) for number in range(12)
            ]
            assert all(put(store, wanted, payload))
            assert all(get_blocks(store, wanted[::-1], payload))
        audit(store)


@pytest.mark.fault
def test_one_bad_slot_of_a_run_is_one_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused by the device when it is written, or read, or damaged there."""
    bad = 2 * SLOT

    def refuse(name: str) -> Callable[..., int]:
        real: Callable[..., int] = getattr(os, name)

        def call(handle: int, parts: Sequence[memoryview], offset: int) -> int:
            if offset <= bad < offset + sum(map(len, parts)):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(handle, parts, offset)

        return call

    wanted = keys(*range(5))
    with opened(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", refuse("pwritev"))
            held = put(store, wanted, PAYLOAD)
            assert held.count(False) == 1 and store.has(wanted) == held
        assert all(put(store, wanted, PAYLOAD))
        assert all(get_blocks(store, wanted, PAYLOAD))
        slots = [row.slot.number for row in found(store, wanted)]
        assert sorted(slots) == [0, 1, 2, 3, 4]
        but_one = [number != 2 for number in slots]
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", refuse("preadv"))
            assert get_blocks(store, wanted, PAYLOAD) == but_one
        assert store.has(wanted) == but_one and store.damaged() == 1
        assert all(put(store, wanted, PAYLOAD))
        slots = [row.slot.number for row in found(store, wanted)]
        with slab_path(tmp_path, PAYLOAD).open("r+b") as file:
            file.seek(3 * SLOT + PAGE + PAYLOAD - 1)
            file.write(b"\xff")
            file.seek(1 * SLOT + HEADER_BYTES - 1)
            file.write(b"\xff")
        assert get_blocks(store, wanted, PAYLOAD) == [number not in (1, 3) for number in slots]
        assert store.damaged() == 3
        audit(store)


def found(store: Any, wanted: Sequence[bytes]) -> list[Any]:
    """The blocks' entries in the index."""
    return list(folder_of(store).index.find([index_key(key) for key in wanted]))


def test_a_run_that_a_file_ends_in_has_its_whole_records(tmp_path: Path) -> None:
    wanted = keys(*range(6))
    with opened(tmp_path) as store:
        assert all(put(store, wanted, PAYLOAD))
        slots = [row.slot.number for row in found(store, wanted)]
        os.truncate(slab_path(tmp_path, PAYLOAD), 4 * SLOT + PAGE)
        assert get_blocks(store, wanted, PAYLOAD) == [number < 4 for number in slots]
