"""A store in memory behind a link of a given bandwidth and latency, and the tier that opens it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import ClassVar

from pydantic import PrivateAttr

from spec.offloading import StoreContext, StoreSpec
from tiers.store import Block, TierStore


class MemoryStore:
    """Blocks in a dict."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, bytes] = {}

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are kept."""
        return [key in self._blocks for key in keys]

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """Copy each payload."""
        self._blocks.update({block.key: bytes(block.payload) for block in blocks})
        return [True] * len(blocks)

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        """Copy each payload back."""
        for block in blocks:
            if block.key in self._blocks:
                block.payload[:] = self._blocks[block.key]
        return self.has([block.key for block in blocks])

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget keys."""
        for key in keys:
            self._blocks.pop(key, None)

    def close(self) -> None:
        """Nothing to release."""


class Link:
    """Bytes pass one after the other, `bandwidth` a second; each request waits `latency` besides.

    Both may be changed while it is used.
    """

    def __init__(self, bandwidth: float, latency: float) -> None:
        self.bandwidth = bandwidth
        self.latency = latency
        self._free_at = 0.0
        self._lock = threading.Lock()  # two that read the same end would pass at once

    def pass_bytes(self, count: int) -> None:
        """Return when so many bytes have passed."""
        with self._lock:
            began = time.perf_counter()
            self._free_at = max(began, self._free_at) + count / self.bandwidth
            until = self._free_at + self.latency
        time.sleep(max(0.0, until - time.perf_counter()))


class ThrottledStore:
    """A store whose loads pass a link; also lookups, for as long as its latency.

    Stores pass freely, so that only loading differs.
    """

    def __init__(self, store: TierStore, link: Link) -> None:
        self._store = store
        self._link = link

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """As the store, after the latency."""
        self._link.pass_bytes(0)
        return self._store.has(keys)

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """As the store."""
        return self._store.put(blocks)

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        """As the store, once the bytes have passed."""
        got = self._store.get(blocks)
        self._link.pass_bytes(sum(len(b.payload) for b, ok in zip(blocks, got, strict=True) if ok))
        return got

    def drop(self, keys: Sequence[bytes]) -> None:
        """As the store."""
        self._store.drop(keys)

    def close(self) -> None:
        """The store goes on: others use it."""


class IndexedStore(ThrottledStore):
    """The same, with an index in this host's memory."""

    def peek(self, keys: Sequence[bytes]) -> list[bool]:
        """As the store, at once."""
        return self._store.has(keys)


class ThrottledSpec(StoreSpec):
    """A tier behind a link: of `indexed` stores presence is known at once, as on disk."""

    is_prompt: ClassVar[bool] = True

    indexed: bool = True
    _store: TierStore = PrivateAttr(default_factory=MemoryStore)
    _link: Link = PrivateAttr(default_factory=lambda: Link(float("inf"), 0.0))

    def over(self, store: TierStore, link: Link) -> ThrottledSpec:
        """This tier, over a store and a link that others may use too."""
        self._store, self._link = store, link
        return self

    def open(self, site: StoreContext) -> ThrottledStore:
        """The store, throttled."""
        kind = IndexedStore if self.indexed else ThrottledStore
        return kind(self._store, self._link)
