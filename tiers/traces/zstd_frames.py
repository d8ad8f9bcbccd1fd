"""Whether a file of zstd frames ends where a frame ends (RFC 8878).

Readers of streams give what precedes the end of a file that is cut off, and do not say that it is.
"""

from __future__ import annotations

import os
from typing import BinaryIO

MAGIC = b"\x28\xb5\x2f\xfd"
_HEADER = 18
"""Bytes of the longest header."""
_RLE = 1
_SKIPPABLE = range(0x184D2A50, 0x184D2A60)


def ends_whole(file: BinaryIO, size: int) -> bool:
    """Whether the first `size` bytes are whole frames, by the lengths that their parts tell."""
    at: int | None = 0
    while at is not None and at < size:
        at = _frame_end(file, at)
    return at == size


def _frame_end(file: BinaryIO, at: int) -> int | None:
    """Where the frame ends that begins there; None: that can't be told."""
    import zstandard

    head = _at(file, at, _HEADER)
    if int.from_bytes(head[:4], "little") in _SKIPPABLE:
        return at + 8 + int.from_bytes(head[4:8], "little")
    try:
        has_checksum = zstandard.get_frame_parameters(head).has_checksum
        at += zstandard.frame_header_size(head)
    except zstandard.ZstdError:
        return None
    is_last = False
    while not is_last:
        block = _at(file, at, 3)
        if len(block) < 3:
            return None
        header = int.from_bytes(block, "little")
        is_last = bool(header & 1)
        at += 3 + (1 if header >> 1 & 3 == _RLE else header >> 3)
    return at + 4 * has_checksum


def _at(file: BinaryIO, at: int, size: int) -> bytes:
    file.seek(at, os.SEEK_SET)
    return file.read(size)
