"""What a request's KV owes to images, audio and whatever else its prompt has beside tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiers.contract.protocols import Request

MARK_BYTES = 16


@dataclass
class MediaMark:
    """What a request's media add to its keys. `shared`: False from the moment on at which it is
    open what its KV was computed from; then nothing of it may be stored.

    `steps`: for each medium the place of its first token and the mark of all blocks that end
    behind it, up to the next one's. Blocks before the first medium are those of its tokens alone.
    """

    steps: list[tuple[int, bytes]] = field(default_factory=list)
    shared: bool = True

    def spans(self, blocks: range, block_tokens: int) -> Iterator[tuple[range, bytes]]:
        """These blocks in runs of one mark each."""
        start, mark = blocks.start, b""
        for token, following in self.steps:
            first = min(token // block_tokens, blocks.stop)
            if first > start:
                yield range(start, first), mark
                start = first
            mark = following
        if start < blocks.stop:
            yield range(start, blocks.stop), mark


def joined(of_request: bytes, of_media: bytes) -> bytes:
    """One mark of at most `MARK_BYTES` of a request's own and its media's."""
    if not of_media:
        return of_request
    return hashlib.blake2b(of_request + of_media, digest_size=MARK_BYTES).digest()


class MediaMarks:
    """Marks of requests with media; for all tiers of an engine, on the scheduler's thread. These
    defaults are those of engines whose prompts are tokens alone."""

    def expect(self, request: Request) -> None:
        """A request has come: begin to find out what its media are."""

    def ready(self, request: Request) -> bool:
        """Whether `of` answers at once."""
        return True

    def give_up(self, request: Request, *, late: bool = True) -> bool:
        """Nobody waits for the mark any more: `of` answers with one of its own from now on, and
        nothing of the request may be stored. `late`: because finding out takes too long. Return
        whether anything was not found out by now."""
        return False

    def of(self, request: Request) -> MediaMark:
        """Its mark; waits for the rest of the work where that is not done yet."""
        return MediaMark()

    def forget(self, request_id: str) -> None:
        """The request has finished, in all tiers."""
