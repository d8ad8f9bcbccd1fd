"""One launch for all pages of all blocks of a wave, by Triton.

The kernel finds pages by a table of addresses, so that it is one launch whatever number of layers
the model has and wherever the blocks are. Its indexing is proved in Triton's interpreter
(`tests/gpu/test_page_kernel.py`), and `agrees` tries it where it is to run.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from tiers.gpu.pages import Copies, PageCopies

CHUNK = 1024
"""Units that one program copies."""
_UNITS = {
    8: (torch.int64, tl.int64),
    4: (torch.int32, tl.int32),
    2: (torch.int16, tl.int16),
    1: (torch.uint8, tl.uint8),
}


@triton.jit(do_not_specialize_on_alignment=["blocks"])  # type: ignore[untyped-decorator]
def _copy_pages(  # type: ignore[no-untyped-def]
    pages, blocks, rows, row_units, GATHER: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr
):
    """Program (item, page, chunk) copies a chunk of that page of blocks[item] to rows[item], or
    back. `pages`: int64, (pages, 4): address, bytes from block to block, units, column in units."""
    item = tl.program_id(0).to(tl.int64)
    page = pages + tl.program_id(1) * 4
    block = tl.load(blocks + item)
    place = tl.program_id(2).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = place < tl.load(page + 2)
    address = tl.load(page) + block * tl.load(page + 1)
    paged = address.to(tl.pointer_type(UNIT)) + place
    staged = rows + item * row_units + tl.load(page + 3) + place
    if GATHER:
        tl.store(staged, tl.load(paged, mask=inside), mask=inside)
    else:
        tl.store(paged, tl.load(staged, mask=inside), mask=inside)


class KernelCopies:
    """As `PageCopies`, in one launch. `unit`: bytes that are copied at once, see `unit_of`."""

    launches = 1

    def __init__(self, pages: Sequence[torch.Tensor], unit: int) -> None:
        self._unit, self._type = _UNITS[unit]
        self._bytes = unit
        table: list[int] = []
        column = 0
        for page in pages:
            units = page.shape[1] // unit
            table += [page.data_ptr(), page.stride(0), units, column]
            column += units
        self._table = torch.tensor(table)  # of the host, so that it need not be made for each copy
        self._grid = len(pages), max(-(-page.shape[1] // unit // CHUNK) for page in pages)

    def numbers(self, blocks: list[int]) -> torch.Tensor:
        """The table of pages and the blocks' numbers, for the device."""
        return torch.cat([self._table, torch.frombuffer(array("q", blocks), dtype=torch.int64)])

    def copy(
        self, numbers: torch.Tensor, first: int, last: int, rows: torch.Tensor, to_rows: bool
    ) -> None:
        start = len(self._table)
        blocks, units = numbers[start + first : start + last], rows.stride(0) // self._bytes
        _copy_pages[last - first, *self._grid](
            numbers, blocks, rows.view(self._unit), units, to_rows, self._type, CHUNK
        )


def unit_of(pages: Sequence[torch.Tensor]) -> int:
    """Bytes, 8 at most, that divide all addresses, strides and lengths."""
    return math.gcd(8, *(n for p in pages for n in (p.data_ptr(), p.stride(0), p.shape[1])))


def agrees(pages: Sequence[torch.Tensor], unit: int) -> bool:
    """Whether the kernel and PyTorch copy the same between made-up pages, of the first pages'
    lengths, on their device. Raises what Triton does where it can't compile or run."""
    make: Callable[[Sequence[torch.Tensor]], Copies]
    device, widths = pages[0].device, [page.shape[1] for page in pages[:2]]
    own = torch.Generator(device).manual_seed(0)  # the engine's draws what requests are answered
    filled = [
        torch.randint(0, 256, (4, width), dtype=torch.uint8, device=device, generator=own)
        for width in widths
    ]
    stride = -(-sum(widths) // 4096) * 4096
    moved: list[list[torch.Tensor]] = []
    for make in (lambda pages: KernelCopies(pages, unit), PageCopies):
        back = [torch.zeros_like(page) for page in filled]
        rows = torch.zeros(3, stride, dtype=torch.uint8, device=device)
        out, into = make(filled), make(back)
        out.copy(out.numbers([1, 3, 0, 2]).to(device), 1, 4, rows, to_rows=True)
        into.copy(into.numbers([1, 3, 0, 2]).to(device), 1, 4, rows, to_rows=False)
        moved.append([rows, *back])
    return all(map(torch.equal, *moved))
