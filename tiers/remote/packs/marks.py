"""Marks beside packs: objects of a few bytes, under names that no pack has."""

from __future__ import annotations

from collections.abc import Sequence

from tiers.remote.packs.bucket import Bucket
from tiers.remote.packs.pack import name_of

_REST = b"mark"
"""Shorter than what any block's key has behind its namespace."""


class BucketMarks:
    """`Marks` in a bucket, which they own. Each is a request of its own."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def mark(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._bucket.put(name_of(name + _REST), [_REST])

    def marked(self, names: Sequence[bytes]) -> list[bool]:
        into = [memoryview(bytearray(len(_REST)))]
        return [self._bucket.read(name_of(name + _REST), 0, into) is not None for name in names]

    def close(self) -> None:
        self._bucket.close()
