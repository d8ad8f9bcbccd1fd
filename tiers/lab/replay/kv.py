"""The replay's paged KV: blocks whose every byte says whose they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from tiers.errors import KVTiersError

if TYPE_CHECKING:
    import numpy.typing as npt

MASK = (1 << 64) - 1
MAX_NAMED = 5


class WrongBytes(KVTiersError):
    """A tier served a block whose bytes are not those that were stored."""


class PagedKV:
    """Paged blocks of so many words (int64) each. Used by the driver's thread alone, but that the
    chain's threads copy in and out of blocks that the engine lets them."""

    def __init__(self, num_blocks: int, words: int) -> None:
        self.tensors = {"layers.0.attn": torch.zeros((num_blocks, 1, words), dtype=torch.int64)}
        # numpy needs no threads for so few bytes; the array is the tensor's memory.
        self._pages = self.tensors["layers.0.attn"].numpy()[:, 0]
        self._places = np.arange(words, dtype=np.int64)

    def compute(self, pages: Sequence[int], ids: Sequence[int]) -> None:
        """Fill pages with the KV of the trace's blocks of these ids."""
        self._pages[pages] = self._kv(ids)

    def verify(self, pages: Sequence[int], ids: Sequence[int], request_id: str) -> None:
        """Compare every byte of the pages with the KV of these ids. Raises WrongBytes."""
        wrong = (self._pages[pages] != self._kv(ids)).any(axis=1)
        if wrong.any():
            bad = [one for one, is_wrong in zip(ids, wrong, strict=True) if is_wrong]
            raise WrongBytes(
                f"{request_id}: {len(bad)} of {len(ids)} loaded blocks have wrong bytes, of ids "
                f"{bad[:MAX_NAMED]}: do not use this chain, and please report it"
            )

    def _kv(self, ids: Sequence[int]) -> npt.NDArray[np.int64]:
        # Ids that a trace may have are hashes of 64 bits; the products wrap.
        numbers = np.array([one & MASK for one in ids], dtype=np.uint64).astype(np.int64)
        return (numbers * 1_000_003)[:, None] + self._places
