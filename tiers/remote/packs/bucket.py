"""What holds packs, and marks beside them: a bucket of an object store, or a directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from tiers.block import Buffer
from tiers.concurrency.executors import IoExecutor
from tiers.errors import TierRefused
from tiers.remote.packs.pack import name_of


class Listed(NamedTuple):
    """One object of a listing. `size` in bytes; `modified`: seconds since the epoch, by the clock
    of whoever keeps it."""

    name: str
    size: int
    modified: float


class Bucket(Protocol):
    """Named pieces of bytes, put whole and never changed. Thread-safe; many calls come at once.

    Names are as of `pack.name_of`: hex digits in three parts with slashes between. Any method may
    raise TierError or OSError, and ends by itself.
    """

    def put(self, name: str, parts: Sequence[Buffer]) -> bool:
        """Keep the bytes of `parts` under a name, all of them or none; False: the name is taken,
        and nothing has changed. Others see it whole, from the return on."""

    def read(self, name: str, start: int, into: Sequence[memoryview]) -> int | None:
        """Fill these views, one after the other, with the bytes from `start` on; return how many
        there were, fewer than asked for at the end, or where they are waited for no more (see
        `time_left`). None: nothing has that name. After the return nothing writes into the
        views."""

    def delete(self, names: Sequence[str]) -> None:
        """Delete these; unknown names are ignored. Raises TierRefused where its user may not: any
        of them may be left then."""

    def list(self, refused: Callable[[TierRefused], None]) -> Iterator[Sequence[Listed]]:
        """List all packs, in pieces of a thousand at most, which may be empty. What its user may
        not read is left out, and `refused` is told. For upkeep: what dead writers left there goes
        on the way."""

    def describe(self) -> str:
        """Its place, without a secret."""

    def close(self) -> None:
        """Release every resource. Idempotent; calls may be in flight."""


_REST = b"mark"
"""Shorter than what any block's key has behind its namespace."""
_AT_ONCE = 8


def is_mark(name: str) -> bool:
    """Whether an object with a name of `pack.name_of` is one."""
    return name.endswith(f"/{_REST.hex()}")


class BucketMarks:
    """`Marks` in a bucket, which they own. Each is a request of its own."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self.close = bucket, bucket.close

    def mark(self, names: Sequence[bytes]) -> None:
        for name in names:
            if not self._is_marked(name):  # to read it is a use, by which it is kept
                self._bucket.put(name_of(name + _REST), [_REST])

    def marked(self, names: Sequence[bytes]) -> list[bool]:
        executor = IoExecutor(min(_AT_ONCE, len(names)), "marks")
        return [*executor.map(self._is_marked, names)]

    def _is_marked(self, name: bytes) -> bool:
        into = [memoryview(bytearray(len(_REST)))]
        return self._bucket.read(name_of(name + _REST), 0, into) is not None
