"""Suite codec: what a codec makes of a block, and how fast, beside zstd on the whole.

The blocks are normally distributed bfloat16 numbers, scaled channel by channel as KV is, so the
ratios are near those of real KV, not the same (`tiers.codec` has those).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Literal

import torch

from bench.main import Scale
from bench.report import Case, Measure, rate
from tiers.codec import Encoder, decode

Name = Literal["none", "zstd", "byteplanes", "auto"]


def cases(scale: Scale, stack: ExitStack) -> Iterator[Case]:
    """Ratio, encoding and decoding of blocks of 2 MiB."""
    payload = _kv((64 << 10 if scale.smoke else 2 << 20) // 2)
    of = f"{len(payload) >> 10} KiB of bfloat16"
    for what, unit, ours in (("ratio,", "x", _ratio), ("encode", "GB/s", _encoding),
                             ("decode", "GB/s", _decoding)):  # fmt: skip
        case, peer = f"byteplanes, {what} {of}", ours(payload, "zstd")
        yield Case("codec", case, unit, ours(payload, "byteplanes"), peer=peer, peer_name="zstd")


def _kv(elements: int) -> memoryview:
    generator = torch.Generator().manual_seed(0)
    scales = torch.rand(128, generator=generator).repeat(-(-elements // 128))[:elements]
    numbers = torch.randn(elements, generator=generator) * scales
    whole = bytearray(2 * elements)
    torch.frombuffer(whole, dtype=torch.bfloat16).copy_(numbers)
    return memoryview(whole)


def _ratio(payload: memoryview, codec: Name) -> Measure:
    return lambda: len(payload) / len(Encoder(codec).encode(payload)[1])


def _encoding(payload: memoryview, codec: Name) -> Measure:
    encoder = Encoder(codec)
    return rate(len(payload), lambda: encoder.encode(payload))


def _decoding(payload: memoryview, codec: Name) -> Measure:
    number, stored = Encoder(codec).encode(payload)
    back = memoryview(bytearray(len(payload)))
    return rate(len(payload), lambda: decode(number, stored, back))
