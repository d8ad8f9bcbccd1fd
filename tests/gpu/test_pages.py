"""Byte views of paged KV: every byte of a block, once, in any layout an engine registers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tiers.gpu.pages import PagedKV, block_pages

BLOCKS = 6


def fused_heads_first() -> torch.Tensor:
    return torch.zeros(BLOCKS, 3, 4, 10, dtype=torch.bfloat16)


def kv_before_blocks() -> torch.Tensor:
    return torch.zeros(2, BLOCKS, 4, 3, 5, dtype=torch.float16)


def kv_after_blocks() -> torch.Tensor:
    return torch.zeros(BLOCKS, 2, 4, 3, 5)


def tokens_before_heads_in_memory() -> torch.Tensor:
    return torch.zeros(BLOCKS, 4, 3, 10).permute(0, 2, 1, 3)


def kernel_blocks_of_half_size() -> torch.Tensor:
    return torch.zeros(BLOCKS * 2, 3, 2, 10)


def padded_pages() -> torch.Tensor:
    return torch.zeros(BLOCKS, 64)[:, :40].view(BLOCKS, 4, 10)


LAYOUTS = [
    fused_heads_first,
    kv_before_blocks,
    kv_after_blocks,
    tokens_before_heads_in_memory,
    kernel_blocks_of_half_size,
    padded_pages,
]


def block_of(cache: torch.Tensor, block: int) -> torch.Tensor:
    """One block's elements, found without the code under test."""
    if cache.shape[0] == 2:
        return cache[:, block]
    ratio = cache.shape[0] // BLOCKS
    return cache[block * ratio : (block + 1) * ratio]


@pytest.mark.parametrize("make", LAYOUTS, ids=lambda make: make.__name__)
def test_a_row_is_all_of_its_block_and_nothing_else(make: Callable[[], torch.Tensor]) -> None:
    cache = make()
    pages = block_pages({"layer": cache}, BLOCKS)
    assert all(page.shape[0] == BLOCKS and page.dtype == torch.uint8 for page in pages)
    for block in range(BLOCKS):
        for page in pages:
            page[block] = 0xAB
        expected = torch.full_like(block_of(cache, block), 0)
        expected = torch.full(expected.shape, 0).to(cache.dtype)
        assert not torch.equal(block_of(cache, block), expected)
        total = block_of(cache, block).numel() * cache.element_size()
        assert sum(page.shape[1] for page in pages) == total
        for other in set(range(BLOCKS)) - {block}:
            assert not block_of(cache, other).any()
        cache.zero_()


def test_layers_interleaved_in_one_allocation() -> None:
    storage = torch.arange(BLOCKS * 3 * 8, dtype=torch.int32)
    whole = storage.view(BLOCKS, 3, 8)
    layers = {f"layer{i}": whole[:, i] for i in range(3)}
    pages = block_pages(layers, BLOCKS)
    row = torch.cat([page[4] for page in pages]).view(torch.int32)
    assert torch.equal(row, whole[4].flatten())


def test_a_tensor_that_layers_share_counts_once() -> None:
    cache = fused_heads_first()
    assert len(block_pages({"a": cache, "b": cache}, BLOCKS)) == 1


def test_a_state_within_the_pages_of_another_layer_counts_once() -> None:
    pages = torch.arange(4 * 64, dtype=torch.uint8).view(4, 64)
    state = pages.as_strided((4, 1, 1, 40), (64, 64, 64, 1), storage_offset=8)
    beyond = torch.zeros(4, 48, dtype=torch.uint8)
    for layers in ({"a": state, "b": pages, "c": beyond}, {"b": pages, "c": beyond, "a": state}):
        views = block_pages(layers, 4)
        assert [view.data_ptr() for view in views] == [pages.data_ptr(), beyond.data_ptr()]


def of_two_groups(second: int) -> dict[str, torch.Tensor]:
    """A block of 64 bytes is one of two groups: of one its layers lie at 0 and at 24, of the other
    at 0, at `second` and at 60; all but the last have 24 bytes."""
    whole = torch.arange(BLOCKS * 64, dtype=torch.uint8).view(BLOCKS, 64)
    places = {"a": (0, 24), "b": (24, 24), "c": (0, 24), "d": (second, 24), "e": (60, 4)}
    return {name: whole[:, at : at + size] for name, (at, size) in places.items()}


def test_blocks_that_groups_lay_out_in_their_own_ways_count_once() -> None:
    layers = of_two_groups(second=32)
    pages = block_pages(layers, BLOCKS)
    assert [page.shape[1] for page in pages] == [24, 32, 4]
    row = torch.cat([page[3] for page in pages])
    assert row.tolist() == [*range(192, 192 + 56), *range(252, 256)]


def test_where_the_layers_of_a_group_lie_in_a_block_is_part_of_the_digest() -> None:
    digests = {PagedKV(of_two_groups(second), BLOCKS).layout for second in (28, 32)}
    assert len(digests) == 2


def test_as_many_tokens_as_blocks_are_no_blocks() -> None:
    """FlashMLA's kernel has blocks of 64 tokens, two of which may be one of 64 of the engine's."""
    cache = torch.zeros(BLOCKS * 2, BLOCKS, 10)
    (page,) = block_pages({"layer": cache}, BLOCKS)
    page[3] = 0xAB
    assert sorted(set(cache.nonzero()[:, 0].tolist())) == [6, 7]


def test_a_tensor_without_blocks_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'layer7'.*\(5, 4\).*6 blocks"):
        block_pages({"layer7": torch.zeros(5, 4)}, BLOCKS)


def test_overlapping_elements_are_refused() -> None:
    with pytest.raises(ValueError, match="overlap"):
        block_pages({"layer": torch.zeros(BLOCKS, 1, 8).expand(BLOCKS, 4, 8)}, BLOCKS)


def test_the_digest_tells_layouts_of_equal_size_apart() -> None:
    heads_first = torch.zeros(BLOCKS, 3, 4, 10)
    digests = {
        PagedKV({"layer": cache}, BLOCKS).layout
        for cache in (
            heads_first,
            tokens_before_heads_in_memory(),
            heads_first.view(torch.int32),
            torch.zeros(BLOCKS, 4, 3, 10),
        )
    }
    assert len(digests) == 4
    assert PagedKV({"layer": heads_first}, BLOCKS).layout in digests


def test_the_digest_is_the_same_for_more_blocks() -> None:
    few, many = (PagedKV({"x": torch.zeros(count, 2, 4)}, count) for count in (6, 60))
    assert few.layout == many.layout
