"""Copies between pages and staged rows on a device, on its current stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch


class Copies(Protocol):
    """Queues copies on the current stream, by `launches` kernels, and waits for nothing.

    `numbers`: what `numbers` made of all blocks of a copy, on the device. `first` and `last`
    (exclusive): which of them now. `rows`: as many staged rows, uint8, contiguous. It keeps nothing
    on the device: an engine that sleeps would take it away.
    """

    launches: int

    def numbers(self, blocks: list[int]) -> torch.Tensor: ...

    def gather(self, numbers: torch.Tensor, first: int, last: int, rows: torch.Tensor) -> None: ...

    def scatter(self, numbers: torch.Tensor, first: int, last: int, rows: torch.Tensor) -> None: ...


class PageCopies:
    """Copies between pages of paged blocks and staged rows, by PyTorch: a launch a page."""

    def __init__(self, pages: Sequence[torch.Tensor]) -> None:
        self._pages = pages
        self.launches = len(pages)

    def numbers(self, blocks: list[int]) -> torch.Tensor:
        """The blocks' numbers, for the device."""
        return torch.tensor(blocks)

    def gather(self, numbers: torch.Tensor, first: int, last: int, rows: torch.Tensor) -> None:
        """Queue copies of these blocks to as many staged rows."""
        for page, column in self._columns(rows):
            torch.index_select(page, 0, numbers[first:last], out=column)

    def scatter(self, numbers: torch.Tensor, first: int, last: int, rows: torch.Tensor) -> None:
        """Queue copies of staged rows to as many blocks."""
        for page, column in self._columns(rows):
            page.index_copy_(0, numbers[first:last], column)

    def _columns(self, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        start = 0
        for page in self._pages:
            stop = start + page.shape[1]
            yield page, rows[:, start:stop]
            start = stop
