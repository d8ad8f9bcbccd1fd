"""The caller's memory in a test of a store, and what belongs into it."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence

from tiers.store import Block

_CANARY = 0xA5


def make_key(length: int = 48, start: bytes = b"") -> bytes:
    """A key nobody has used, of `length` bytes of any value, beginning with `start`."""
    return start + secrets.token_bytes(length - len(start))


def payload_of(key: bytes, payload_bytes: int, version: int = 0) -> bytes:
    """The bytes that belong to a key: half of them random, half compressible."""
    noise = random.Random(key + bytes([version])).randbytes(payload_bytes // 2)
    return (noise + key * (payload_bytes // len(key) + 1))[:payload_bytes]


class Memory:
    """The caller's memory for a batch: payloads with a canary on both sides of each.

    `shift` moves the first payload that many bytes from where the memory starts.
    """

    def __init__(self, keys: Sequence[bytes], payload_bytes: int, shift: int = 64) -> None:
        gap = 64
        stride = payload_bytes + gap
        self._bytes = bytearray([_CANARY]) * (shift + stride * len(keys))
        view = memoryview(self._bytes)
        starts = [shift + index * stride for index in range(len(keys))]
        self.blocks = [
            Block(key, view[start : start + payload_bytes])
            for key, start in zip(keys, starts, strict=True)
        ]
        self._outside = [view[:shift]]
        self._outside += [view[start + payload_bytes : start + stride] for start in starts]

    def fill(self, version: int = 0) -> Memory:
        """Write what belongs to each key into its payload."""
        for key, payload in self.blocks:
            payload[:] = payload_of(key, len(payload), version)
        return self

    def readonly(self) -> list[Block]:
        """The blocks as `put` is given them."""
        return [block.readonly() for block in self.blocks]

    def copy(self) -> bytes:
        """All bytes, those between the payloads too."""
        return bytes(self._bytes)

    def holds(self, index: int, version: int = 0) -> bool:
        """Whether a payload holds what belongs to its key."""
        key, payload = self.blocks[index]
        return payload == payload_of(key, len(payload), version)

    def check_canaries(self) -> None:
        """Fail if a byte outside the payloads was written."""
        for gap in self._outside:
            assert set(gap) <= {_CANARY}, "memory outside the payload was written"
