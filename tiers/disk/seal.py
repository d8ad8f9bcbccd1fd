"""The index's seal: a checksum of its file, which lies beside it while no process has it open.

LMDB trusts every page: a flipped bit in one can send it anywhere, out of the process's memory too,
and then the engine dies. So the last process to close the folder cleanly seals the index, and the
first to open it compares. A process that is killed leaves no seal, and there is none while the
index is in use: what it wrote is then the kernel's to keep right.
"""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

from tiers.disk.failures import Damaged
from tiers.disk.slab import sync_folder

_AT_ONCE = 1 << 20
_CONDEMNED = b"damaged"


def require(index: Path, seal: Path) -> None:
    """Raise Damaged if there is a seal and the index is another than was sealed. OSError."""
    try:
        found = seal.read_bytes()
    except FileNotFoundError:
        return
    if found == _CONDEMNED:
        raise Damaged(f"{index} was found to be damaged when it was last in use")
    if not index.exists() or found != _digest(index):
        raise Damaged(f"{index} is not as it was closed")


def remove(seal: Path) -> None:
    """Break the seal before the index is changed; before that is done, so is the name's removal,
    else a power cut could bring the seal of an older index back. Raises OSError."""
    if seal.exists():
        seal.unlink()
        sync_folder(seal.parent)


def put(index: Path, seal: Path) -> None:
    """Seal an index that is closed and synced, unless it was condemned. Raises OSError."""
    if not seal.exists():
        _write(seal, _digest(index))


def condemn(seal: Path) -> None:
    """Let the next to open the index wipe it. Raises OSError."""
    _write(seal, _CONDEMNED)


def _digest(index: Path) -> bytes:
    state = xxhash.xxh3_128()
    piece = bytearray(_AT_ONCE)
    with index.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            state.update(memoryview(piece)[:count])
    return state.hexdigest().encode()


def _write(seal: Path, content: bytes) -> None:
    # Under its name only when it is whole: a seal cut by a power cut would condemn the index.
    draft = seal.with_suffix(".draft")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(handle, content)
        os.fsync(handle)
    finally:
        os.close(handle)
    draft.rename(seal)
