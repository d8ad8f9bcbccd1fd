"""A trace as its users see it, whatever format its files have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_MAX_NOTES = 20
TOGETHER = "engines recorded at the same time: name a folder with the files of one"


class TraceRequest(NamedTuple):
    """One request. Ids stand for a block and all blocks before it, so equal ids mean equal
    prefixes, also in other requests."""

    timestamp: float
    """Milliseconds since the start of the trace; never less than that of the request before."""
    input_length: int
    """Tokens of the prompt."""
    output_length: int
    """Tokens of the answer."""
    blocks: Sequence[int]
    """Ids of the prompt's full blocks, from the first on; a partial last block has none. The
    list is the reader's own: do not change it."""
    salt: str | None = None
    """Keyed digest of the request's cache salt, where it was recorded; `blocks` depend on it."""
    answer_blocks: Sequence[int] = ()
    """Ids of the blocks that the answer filled, where they were recorded; the first of them may
    begin in the prompt. A later turn of the conversation has them in its prompt."""


@dataclass(frozen=True)
class TraceHeader:
    """The facts of all requests of a trace."""

    block_tokens: int
    """Tokens of a block, as its ids count them."""
    format: str
    """The format of the files, in words."""
    kv_bytes_per_token: int | None = None
    """KV bytes of a token, over all layers and ranks, where it was recorded."""


@dataclass
class TraceSummary:
    """The work of one iteration over a trace so far: bytes, things left out."""

    bytes_read: int = 0
    """Bytes of the files that have been read, as they lie on disk: progress towards
    `Trace.file_bytes`."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Counts of things left out or mended, by their kind."""
    notes: list[str] = field(default_factory=list)
    """The first examples of it, each with its file and line."""

    def skip(self, what: str, where: str | None = None) -> None:
        """Count what was left out, and keep `where` as an example if there are few yet."""
        self.skipped[what] += 1
        if where is not None and len(self.notes) < _MAX_NOTES:
            self.notes.append(where)


class Trace:
    """Requests in the order of their time. Each iteration reads the files again, as a stream: in
    memory is one line, or one conversation where a format nests them.

    Iterating raises `TraceError` naming file and line. Not for two iterations at once where
    `summary` matters.
    """

    def __init__(
        self,
        header: TraceHeader,
        paths: Sequence[Path],
        read: Callable[[TraceSummary], Iterator[TraceRequest]],
    ) -> None:
        self.header = header
        self.paths = tuple(paths)
        self.summary = TraceSummary()
        """Of the iteration that was begun last."""
        self._read = read

    @property
    def file_bytes(self) -> int:
        """The size of the files on disk; one that rotation has deleted counts nothing."""
        return sum(path.stat().st_size for path in self.paths if path.exists())

    def __iter__(self) -> Iterator[TraceRequest]:
        """The requests, with times that never go backwards and begin at 0."""
        summary = self.summary = TraceSummary()
        start: float | None = None
        latest = 0.0
        for request in self._read(summary):
            if start is None:
                start = request.timestamp
            time = request.timestamp - start
            if time < latest:
                summary.skip("times before the request before, taken as its: sort the lines")
                time = latest
            latest = time
            yield request if time == request.timestamp else request._replace(timestamp=time)
