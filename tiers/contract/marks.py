"""Marks: what a request's KV depends on beside tokens, and reports of loaded LoRA adapters."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from tiers.contract.protocols import Request

MARK_BYTES = 16


@dataclass
class MediaMark:
    """What a request's media add to its keys. `shared`: False once it is in doubt what
    its KV was computed from; then nothing of it may be stored.

    `steps`: for each medium, in the order of the prompt, the place of its first token and the mark
    of all blocks that end behind it, up to the next one's. Blocks before the first medium are those
    of its tokens alone.
    """

    steps: list[tuple[int, bytes]] = field(default_factory=list)
    shared: bool = True

    def spans(self, blocks: range, block_tokens: int) -> Iterator[tuple[range, bytes]]:
        """These blocks in runs of one mark each."""
        start = blocks.start
        # Asked for each new block of an answer: a prompt of 128k tokens may have as many steps.
        at = bisect_left(self.steps, (start + 1) * block_tokens, key=itemgetter(0))
        mark = self.steps[at - 1][1] if at else b""
        while at < len(self.steps) and start < blocks.stop:
            token, following = self.steps[at]
            first = min(token // block_tokens, blocks.stop)
            if first > start:
                yield range(start, first), mark
                start = first
            mark, at = following, at + 1
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

    def ready(self, request: Request) -> bool:
        """Whether `of` answers at once; begin to find out what its media are."""
        return True

    def give_up(self, request: Request, *, late: bool = True) -> bool:
        """Nobody waits for the mark any more: `of` answers with one of its own from now on, and
        nothing of the request may be stored. `late`: because finding out takes too long. Return
        whether anything was not found out by now."""
        return False

    def of(self, request: Request) -> MediaMark:
        """Its mark, one object until it is forgotten; waits for the rest of the work on it."""
        return MediaMark()

    def cut(self, request: Request, tokens: int) -> int:
        """How many leading tokens of `tokens` may be computed or loaded apart from those behind:
        fewer where each token of a medium attends to all of it, and the last is within one."""
        return tokens

    def all_or_nothing(self, request: Request) -> bool:
        """Whether it has media of which `cut` leaves no part."""
        return False

    def doubt(self, request: Request) -> None:
        """Nothing is stored any more of requests with media of this one: the engine's own cache may
        have KV of a part of them, under the name of the whole."""

    def forget(self, request_id: str) -> None:
        """The request has finished, in all tiers."""


@dataclass
class RequestMark(MediaMark):
    """What a request adds to its keys from its first block on. Until it is `shared` it has no keys,
    so that nothing of it is loaded or stored.

    `adapter`: the name by which workers know the adapter that its blocks are computed with; empty:
    none. `content`: names that one's weights, once it is `shared`, for any number of ranks.
    `may_load`: whether the engine will compute with the weights that the keys stand for; a worker
    that does not stores nothing, but what was loaded can't be taken back.
    """

    adapter: bytes = b""
    content: bytes = b""
    may_load: bool = True

    @property
    def loadable(self) -> bool:
        """Whether blocks may be loaded."""
        return self.shared and self.may_load


class LoadedAdapter(NamedTuple):
    """What one worker has loaded as an adapter.

    `number`: the engine's for it. `content`: digest of the weights; empty: they were not the same
    each time. `stamp`: what changes when the files that they came from are replaced; empty: nobody
    can tell.
    """

    number: int
    content: bytes
    stamp: bytes


AdapterReports = Mapping[int, Mapping[bytes, LoadedAdapter]]
"""By rank and by the adapter's name, what was loaded since the last report."""


class LoadedAdapters:
    """The adapters that a worker's engine has loaded. These defaults are those of an engine whose
    adapters can't be seen, or that has none."""

    def report(self) -> dict[bytes, LoadedAdapter]:
        """What is new since the last call, by the adapter's name."""
        return {}

    def may_store(self, adapter: bytes) -> bool:
        """Whether all KV that was computed with this adapter was computed with the same weights, as
        the scheduler believed when it gave the order."""
        return True


NO_ADAPTERS = LoadedAdapters()


class RequestMarks:
    """Marks of requests; for all tiers of an engine, on the scheduler's thread, which they never
    keep waiting. These defaults are those of engines whose block hashes say all that a request's KV
    depends on, but for its media."""

    def ready(self, request: Request) -> bool:
        """Whether it is known what may be loaded for the request; if not, a later step knows."""
        return True

    def of(self, request: Request) -> RequestMark:
        """The request's mark, which changes with what workers report."""
        return RequestMark()

    def forget(self, request_id: str) -> None:
        """The request has finished, in all tiers."""

    def take_reports(self, reports: AdapterReports) -> None:
        """Take what workers have loaded since their last report."""
