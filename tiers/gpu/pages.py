"""Byte views of an engine's paged KV, whatever its layout, and their copies to staged rows.

An engine registers one tensor per layer. Its blocks lie along one dimension; the rest of its
shape (K and V fused or apart, heads before or after tokens, layers interleaved in one allocation)
differs by attention backend and version, so nothing is assumed of it: the strides say where a
block's bytes are.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch

KEYS_AND_VALUES = 2
"""What the first dimension of older engines' tensors has, where the second is that of blocks."""


class PagedKV:
    """An engine's paged KV as bytes. `pages`: see `block_pages`; `layout`: see `layout_digest`;
    `payload_bytes`: of one block over all pages."""

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        self.pages = block_pages(kv_caches, num_blocks)
        self.layout = layout_digest(kv_caches, self.pages)
        self.payload_bytes = sum(page.shape[1] for page in self.pages)
        self._num_blocks = num_blocks

    def require_in_range(
        self, blocks: Sequence[int], rows: torch.Tensor, slots: Sequence[int]
    ) -> None:
        """Raise IndexError where memory of others would be copied, or the two differ in length; a
        CUDA device would end the engine."""
        if (
            len(blocks) != len(slots)
            or not all(0 <= block < self._num_blocks for block in blocks)
            or not all(0 <= slot < rows.shape[0] for slot in slots)
        ):
            raise IndexError(
                f"blocks {blocks} or slots {slots} are out of range: there are "
                f"{self._num_blocks} blocks and {rows.shape[0]} slots"
            )


def block_pages(kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> list[torch.Tensor]:
    """View every layer's tensor as pages: uint8, shape (num_blocks, page_bytes), no copies.

    A block's payload is its row of every page view, in this order. Bytes that several layers share
    are viewed once: a state within the pages of attention, or layers of several KV cache groups,
    whose blocks lie in one allocation, each group's in its own way. The views alias the engine's
    memory and live as long as it does. Raises ValueError for a tensor without a block dimension or
    with overlapping elements.
    """
    views = [v for name, cache in kv_caches.items() for v in _pages(name, cache, num_blocks)]
    pages: list[torch.Tensor] = []
    places: list[int] = []
    # Pages that overlap are of one block: else elements of one tensor would overlap.
    for place, view in sorted(enumerate(views), key=lambda one: (one[1].stride(), _start(one[1]))):
        room = _start(view) - _start(pages[-1]) if pages else 0
        if pages and pages[-1].stride() == view.stride() and room < pages[-1].shape[1]:
            last, size = pages[-1], max(room + view.shape[1], pages[-1].shape[1])
            pages[-1] = last.as_strided((last.shape[0], size), last.stride())
            places[-1] = min(places[-1], place)
        else:
            pages.append(view)
            places.append(place)
    return [page for _, page in sorted(zip(places, pages, strict=True), key=lambda one: one[0])]


def _start(view: torch.Tensor) -> int:
    """Where its first block begins, in bytes; on the meta device, which has no addresses, too."""
    return view.untyped_storage().data_ptr() + int(view.storage_offset()) * view.element_size()


def layout_digest(kv_caches: Mapping[str, torch.Tensor], pages: Sequence[torch.Tensor]) -> str:
    """Text that is equal only where the same bytes of a block mean the same KV: of layer names,
    dtypes, shapes, the order of strides within a block, and where in a page a layer begins."""
    digest = hashlib.blake2b(digest_size=16)
    for name, cache in kv_caches.items():
        blocked = _blocks_first(name, cache, pages[0].shape[0])
        inner = tuple(blocked.shape[1:]), tuple(blocked.stride()[1:])
        at = _start(blocked)
        page = next(page for page in pages if 0 <= at - _start(page) < page.shape[1])
        place = (at - _start(page),) if at > _start(page) else ()
        digest.update(repr((name, str(cache.dtype), inner, *place)).encode())
    return digest.hexdigest()


def _blocks_first(name: str, cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Move the block dimension to the front; engines put it first or, older ones, second. A block
    of a kernel may be a fraction of the engine's."""
    sizes = cache.shape[:2]
    exact = [d for d, size in enumerate(sizes) if size == num_blocks]
    split = [d for d, size in enumerate(sizes) if size % num_blocks == 0]
    if not split or cache.numel() == 0:
        raise ValueError(
            f"layer {name!r}: no block dimension in shape {tuple(cache.shape)}; one of the first "
            f"two must be a multiple of {num_blocks} blocks"
        )
    # What stands before blocks is K and V. Behind a larger one, a dimension as long as there are
    # blocks is one by chance: of tokens, or of heads.
    front = exact[0] if exact and (exact[0] == 0 or sizes[0] == KEYS_AND_VALUES) else split[0]
    whole = cache.movedim(front, 0)
    return whole if sizes[front] == num_blocks else whole.unflatten(0, (num_blocks, -1))


def _pages(name: str, cache: torch.Tensor, num_blocks: int) -> Iterator[torch.Tensor]:
    """Views of the contiguous runs of bytes that every block of one tensor is made of."""
    blocked = _blocks_first(name, cache, num_blocks)
    run = 1
    outer: list[tuple[int, int]] = []
    dims = [(s, n) for s, n in zip(blocked.stride()[1:], blocked.shape[1:], strict=True) if n > 1]
    for stride, size in sorted(dims):
        if stride == run and not outer:
            run *= size
        elif stride < run:
            raise ValueError(f"layer {name!r}: elements overlap (strides {cache.stride()})")
        else:
            outer.append((stride, size))
    item = cache.element_size()
    steps = [[i * stride for i in range(size)] for stride, size in reversed(outer)]
    for offsets in itertools.product(*steps):
        yield torch.empty(0, dtype=torch.uint8, device=cache.device).set_(
            cache.untyped_storage(),
            (blocked.storage_offset() + sum(offsets)) * item,
            (num_blocks, run * item),
            (blocked.stride(0) * item, 1),
        )


class Copies(Protocol):
    """Queues copies on the current stream, by `launches` kernels, and waits for nothing.

    `numbers`: what `numbers` made of all blocks of a copy, on the device. `first` and `last`
    (exclusive): which of them now. `rows`: as many staged rows, uint8, contiguous; `to_rows`: they
    are filled, else copied to the pages. It keeps nothing on the device: an engine that sleeps
    would take it away.
    """

    launches: int

    def numbers(self, blocks: list[int]) -> torch.Tensor: ...

    def copy(
        self, numbers: torch.Tensor, first: int, last: int, rows: torch.Tensor, to_rows: bool
    ) -> None: ...


class PageCopies:
    """Copies between pages of paged blocks and staged rows, by PyTorch: a launch a page."""

    def __init__(self, pages: Sequence[torch.Tensor]) -> None:
        self._pages = pages
        self.launches = len(pages)

    def numbers(self, blocks: list[int]) -> torch.Tensor:
        return torch.tensor(blocks)

    def copy(
        self, numbers: torch.Tensor, first: int, last: int, rows: torch.Tensor, to_rows: bool
    ) -> None:
        start, some = 0, numbers[first:last]
        for page in self._pages:
            column = rows[:, start : start + page.shape[1]]
            start += page.shape[1]
            if to_rows:
                torch.index_select(page, 0, some, out=column)
            else:
                page.index_copy_(0, some, column)
