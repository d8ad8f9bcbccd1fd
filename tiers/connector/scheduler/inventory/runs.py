"""Run: blocks that were announced together, and the bytes that it is kept as.

A run takes 34 bytes a block for the key and 4 a token: about 100 for a block of 16 tokens, whose KV
has a megabyte.
"""

from __future__ import annotations

import json
import struct
import zlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tiers.contract.block_events import Origin

_FRAME = struct.Struct("<II")
_HEAD = struct.Struct("<HHII")
MAX_RUN_BYTES = 64 << 20
"""A longer frame is damage: a run is what one step stored."""


class Run(NamedTuple):
    """Blocks of one KV cache group that follow each other in a prompt; see `BlockEvent`.

    `keys`: those that tiers have, whose first `hash_bytes` are the engine's hash.
    """

    keys: Sequence[bytes]
    hash_bytes: int
    group: int
    block_tokens: int
    parent: bytes | None
    origin: Origin

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """The engine's hashes."""
        return tuple(key[: self.hash_bytes] for key in self.keys)

    def held(self, held: Sequence[bool]) -> Iterator[Run]:
        """The parts of this run that are held."""
        begin = 0
        for end in range(len(held) + 1):
            if end < len(held) and held[end]:
                continue
            if end > begin:
                yield self.part(begin, end)
            begin = end + 1

    def part(self, begin: int, end: int) -> Run:
        """The blocks of these numbers."""
        if end - begin == len(self.keys):
            return self
        origin, size = self.origin, self.block_tokens
        return self._replace(
            keys=self.keys[begin:end],
            parent=self.keys[begin - 1][: self.hash_bytes] if begin else self.parent,
            origin=origin._replace(
                tokens=origin.tokens[begin * size : end * size],
                extra_keys=origin.extra_keys and origin.extra_keys[begin:end],
            ),
        )


def pack(run: Run) -> bytes:
    """A run as bytes, with their length and checksum. Raises ValueError and TypeError for what
    can't be kept: keys of several lengths, or what an engine adds that JSON has no form for."""
    sizes = {len(key) for key in run.keys}
    if len(sizes) != 1:
        raise ValueError("keys of several lengths")
    origin = run.origin
    said = [
        run.group,
        run.block_tokens,
        (run.parent or b"").hex(),
        origin.lora_id,
        origin.lora_name,
        origin.extra_keys,
    ]
    head = json.dumps(said).encode()
    body = b"".join(
        [
            _HEAD.pack(sizes.pop(), run.hash_bytes, len(run.keys), len(head)),
            head,
            *run.keys,
            array("I", origin.tokens).tobytes(),
        ]
    )
    return _FRAME.pack(len(body), zlib.crc32(body)) + body


def unpack(data: bytes) -> Iterator[Run]:
    """The runs in a file, up to the first that is damaged, such as one cut off by a crash."""
    at = 0
    while len(data) - at >= _FRAME.size:
        size, checksum = _FRAME.unpack_from(data, at)
        body = data[at + _FRAME.size : at + _FRAME.size + size]
        if size > MAX_RUN_BYTES or len(body) < size or zlib.crc32(body) != checksum:
            return
        try:
            yield _run(body)
        except (ValueError, TypeError, struct.error):  # whole, and of another version
            return
        at += _FRAME.size + size


def _run(body: bytes) -> Run:
    key_bytes, hash_bytes, count, head_bytes = _HEAD.unpack_from(body)
    start = _HEAD.size
    said: list[Any] = json.loads(body[start : start + head_bytes])
    group, block_tokens, parent, lora_id, lora_name, extra_keys = said
    start += head_bytes
    end = start + count * key_bytes
    keys = [body[i : i + key_bytes] for i in range(start, end, key_bytes)]
    tokens = array("I", body[end:])
    origin = Origin(tokens.tolist(), lora_id, lora_name, _tuples(extra_keys))
    return Run(keys, hash_bytes, group, block_tokens, bytes.fromhex(parent) or None, origin)


def _tuples(keys: Any) -> Any:
    """An engine's extra keys as it had them: a list of tuples, which JSON has no form for."""
    if keys is None:
        return None
    return [
        None if one is None else tuple(tuple(k) if type(k) is list else k for k in one)
        for one in keys
    ]
