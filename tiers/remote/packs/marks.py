"""Marks beside packs: objects of a few bytes, under names that no pack has."""

from __future__ import annotations

from collections.abc import Sequence

from tiers.concurrency.executors import IoExecutor
from tiers.remote.packs.bucket import Bucket
from tiers.remote.packs.pack import name_of

_REST = b"mark"
"""Shorter than what any block's key has behind its namespace."""
_AT_ONCE = 8


def is_mark(name: str) -> bool:
    """Whether an object with a name of `pack.name_of` is one."""
    return name.endswith(f"/{_REST.hex()}")


class BucketMarks:
    """`Marks` in a bucket, which they own. Each is a request of its own."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def mark(self, names: Sequence[bytes]) -> None:
        for name in names:
            if not self._is_marked(name):  # to read it is a use, by which it is kept
                self._bucket.put(name_of(name + _REST), [_REST])

    def marked(self, names: Sequence[bytes]) -> list[bool]:
        executor = IoExecutor(min(_AT_ONCE, len(names)), "marks")
        try:
            return [*executor.map(self._is_marked, names)]
        finally:
            executor.shutdown(wait=False, cancel_futures=True)

    def _is_marked(self, name: bytes) -> bool:
        into = [memoryview(bytearray(len(_REST)))]
        return self._bucket.read(name_of(name + _REST), 0, into) is not None

    def close(self) -> None:
        self._bucket.close()
