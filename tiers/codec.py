"""How a payload is written into a record: as it is, or compressed without loss."""

from __future__ import annotations

import zstandard

from tiers.block import Buffer
from tiers.errors import RecordError

CODECS = {"none": 0, "zstd": 1}
"""Codec names as in the YAML, and the numbers that stand for them in a record's header."""


def encode(codec: str, payload: memoryview) -> Buffer:
    """Encode a payload; with "none" the result is the caller's own memory, not a copy."""
    if CODECS[codec] == CODECS["none"]:
        return payload
    return zstandard.ZstdCompressor(level=1).compress(payload)


def decode(codec: int, stored: Buffer, payload: memoryview) -> None:
    """Decode `stored` into `payload`, which it must fill exactly. Raises RecordError."""
    if codec == CODECS["none"]:
        if len(stored) != len(payload):
            raise RecordError(f"{len(stored)} bytes for a payload of {len(payload)}")
        payload[:] = stored
    elif codec == CODECS["zstd"]:
        _decompress(stored, payload)
    else:
        raise RecordError(f"unknown codec {codec}")


def _decompress(stored: Buffer, payload: memoryview) -> None:
    # A record is not trusted to say how much memory it needs: the caller's length bounds it.
    try:
        if zstandard.frame_content_size(stored) != len(payload):
            raise RecordError("compressed payload has another length")
        payload[:] = zstandard.ZstdDecompressor().decompress(stored)
    except (zstandard.ZstdError, ValueError) as error:
        raise RecordError(f"compressed payload does not decode: {error}") from error
