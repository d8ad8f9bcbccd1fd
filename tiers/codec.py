"""How a payload is written into a record: as it is, or compressed without loss.

`byteplanes` is for KV of two bytes an element (bfloat16, float16): the upper bytes hold sign and
exponent, which repeat much, and are compressed by zstd; the lower bytes are noise, and stay as they
are. Of real KV it makes 1.46 times less where zstd on the whole makes 1.28, and costs 2 s of a core
per GB (measured on SmolLM2-135M in bfloat16). That pays for a link or device slower than some
0.7 GB/s, or where room is short.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

import zstandard

from tiers.block import Buffer, address_of, copy
from tiers.errors import OtherFormat, RecordError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

CODECS = {"none": 0, "zstd": 1, "byteplanes": 2}
"""How a payload can be stored, and the numbers that stand for it in a record's header."""

LEVEL = 1
SAMPLES = 16
"""Blocks that `auto` encodes before it decides, and again after each `EVERY` of them."""
EVERY = 4096
PIECE = 1 << 15
"""Elements moved at once: torch divides larger copies among threads, which the engine needs, and
which cost ten times what they save where a core is busy."""
WORTH = 1.15
"""The least ratio for which `auto` encodes: plain bytes over encoded bytes."""


class Encoder:
    """A tier's codec: `none`, `zstd`, `byteplanes`, or `auto`: byteplanes where they pay.

    Payloads that a codec does not make smaller are stored as they are. Any thread may encode.
    """

    def __init__(
        self, codec: Literal["none", "zstd", "byteplanes", "auto"], tier: str = ""
    ) -> None:
        self._tier = tier
        self._auto = codec == "auto"
        self._codec = "byteplanes" if codec == "auto" else codec
        # Of threads that encode at once each must find the counts as the other left them.
        self._lock = threading.Lock()
        self._seen = self._plain = self._packed = 0
        self._announced = ""

    def encode(self, payload: memoryview) -> tuple[int, Buffer]:
        """The codec's number and the stored bytes; those may be the caller's own memory."""
        if self._codec == "none" or not self._should_try():
            return CODECS["none"], payload
        stored = _ENCODERS[self._codec](payload)
        if self._auto:
            self._learn(len(payload), len(stored))
        if len(stored) >= len(payload):
            return CODECS["none"], payload
        return CODECS[self._codec], stored

    @property
    def ratio(self) -> float:
        """How many times smaller the sampled blocks became; 0: none was sampled."""
        return self._plain / self._packed if self._packed else 0.0

    def _should_try(self) -> bool:
        if not self._auto:
            return True
        with self._lock:
            self._seen += 1
            sampled = self._seen % EVERY <= SAMPLES
            return sampled or self.ratio >= WORTH

    def _learn(self, plain: int, packed: int) -> None:
        with self._lock:
            # Older samples fade, so that another model's KV is judged by its own.
            self._plain += plain - self._plain // 64
            self._packed += packed - self._packed // 64
            choice = "byteplanes" if self.ratio >= WORTH else "none"
            if self._seen < SAMPLES or choice == self._announced:
                return
            self._announced = choice
        logger.info(
            "tier %r: codec auto takes %s; byteplanes: %.2f", self._tier, choice, self.ratio
        )


def decode(codec: int, stored: Buffer, payload: memoryview) -> None:
    """Decode `stored` into `payload`, which it must fill exactly. Raises RecordError, and
    OtherFormat for a codec of a later version."""
    if codec == CODECS["none"]:
        if len(stored) != len(payload):
            raise RecordError(f"{len(stored)} bytes for a payload of {len(payload)}")
        copy(payload, stored)
    elif codec == CODECS["zstd"]:
        copy(payload, decompress(stored, len(payload)))
    elif codec == CODECS["byteplanes"]:
        _join(stored, payload)
    else:
        raise OtherFormat(f"unknown codec {codec}")


def compress(payload: Buffer) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(payload)


def _split(payload: memoryview) -> bytes:
    """The upper bytes compressed, then the lower ones; a last odd byte counts as a lower one."""
    pairs = len(payload) // 2
    planes = bytearray(2 * pairs)
    for elements, upper, lower in _pieces(payload, planes):
        upper.copy_(elements >> 8)
        lower.copy_(elements)
    both = memoryview(planes)
    return b"".join((compress(both[:pairs]), both[pairs:], payload[2 * pairs :]))


def _join(stored: Buffer, payload: memoryview) -> None:
    pairs = len(payload) // 2
    rest = len(payload) - pairs
    data = memoryview(stored)
    if len(data) <= rest or not pairs:
        raise RecordError(f"{len(data)} stored bytes for a payload of {len(payload)} in planes")
    lower_plane = data[len(data) - rest :]
    upper_plane = decompress(data[: len(data) - rest], pairs)
    planes = bytearray(2 * pairs)
    copy(memoryview(planes)[:pairs], upper_plane)
    copy(memoryview(planes)[pairs:], lower_plane[:pairs])
    for elements, upper, lower in _pieces(payload, planes):
        elements.copy_(upper)
        elements.bitwise_left_shift_(8).bitwise_or_(lower)
    payload[2 * pairs :] = lower_plane[pairs:]


def _pieces(
    payload: memoryview, planes: bytearray
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Piece by piece: int16 elements of the payload, and their upper and lower bytes' place."""
    pairs = len(planes) // 2
    if not pairs:
        return
    import torch  # a process that stores blocks needs it for this alone, and it takes 200 MB

    # It warns of a payload that is read-only, as one to encode is.
    memory = (ctypes.c_char * len(payload)).from_address(address_of(payload))
    elements = torch.frombuffer(memory, dtype=torch.int16, count=pairs)
    upper, lower = torch.frombuffer(planes, dtype=torch.uint8).view(2, pairs)
    for start in range(0, pairs, PIECE):
        piece = slice(start, start + PIECE)
        yield elements[piece], upper[piece], lower[piece]


def decompress(stored: Buffer, length: int) -> bytes:
    """What `compress` made `stored` of. Raises RecordError if it is not of that length."""
    # A record is not trusted to say how much memory it needs: the caller's length bounds it.
    try:
        if zstandard.frame_content_size(stored) != length:
            raise RecordError("compressed payload has another length")
        return zstandard.ZstdDecompressor().decompress(stored)
    except (zstandard.ZstdError, ValueError) as error:
        raise RecordError(f"compressed payload does not decode: {error}") from error


_ENCODERS: dict[str, Callable[[memoryview], Buffer]] = {"zstd": compress, "byteplanes": _split}
