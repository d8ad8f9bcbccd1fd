"""What a request's KV owes to its LoRA adapter, and what workers say of those they have loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tiers.contract.media import MediaMark

if TYPE_CHECKING:
    from tiers.contract.protocols import Request


@dataclass
class RequestMark(MediaMark):
    """What a request adds to its keys from its first block on. Until it is `shared` it has no keys,
    so that nothing of it is loaded or stored.

    `adapter`: the name by which workers know the adapter that its blocks are computed with; empty:
    none. `may_load`: whether the engine will compute with the weights that the keys stand for; a
    worker that does not stores nothing, but what was loaded can't be taken back.
    """

    adapter: bytes = b""
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
        """Whether it is known what may be loaded for the request; if not, it is in a later
        step."""
        return True

    def of(self, request: Request) -> RequestMark:
        """The request's mark, which changes with what workers report."""
        return RequestMark()

    def forget(self, request_id: str) -> None:
        """The request has finished, in all tiers."""

    def heard(self, reports: AdapterReports) -> None:
        """Take in what workers have loaded since their last report."""
