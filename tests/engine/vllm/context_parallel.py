"""Decode context parallelism on the CPU, which vLLM has for devices alone.

Everything but a kernel is vLLM's own: its settings, its scheduler's longer blocks, its groups of
ranks. This module has the attention, in plain PyTorch: a rank keeps its part of each request's
tokens, and all ranks of a group put their parts together before they attend.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_dcp_group
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.worker.block_table import BlockTable


def places(
    positions: torch.Tensor, block_tokens: int, interleave: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of tokens at these positions: which block of the request they are in, their place in this
    rank's part of it, and whether they are in that part."""
    group = get_dcp_group()
    ranks = group.world_size
    block = positions // (block_tokens * ranks)
    within = positions % (block_tokens * ranks)
    here = within // interleave % ranks == group.rank_in_group
    return block, within // (ranks * interleave) * interleave + within % interleave, here


class PlainAttention(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Attention over all tokens of a request, of which this rank's cache has a part."""

    can_return_lse_for_decode = True  # vLLM asks for it, to put parts together in another way

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        parallel = get_current_vllm_config().parallel_config
        self._interleave = parallel.cp_kv_cache_interleave_size

    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any
    ) -> None:
        slots = slot_mapping[: len(key)]
        here = slots >= 0
        blocks, at = slots[here] // kv_cache.shape[2], slots[here] % kv_cache.shape[2]
        kv_cache[blocks, :, at] = torch.cat([key, value], dim=-1)[here]

    def forward(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any,
        **scales: Any,
    ) -> Any:
        if attn_metadata is None:
            return output
        starts = attn_metadata.query_start_loc.tolist()
        for request, length in enumerate(attn_metadata.seq_lens.tolist()):
            first, end = starts[request], starts[request + 1]
            positions = torch.arange(length)
            block, at, here = places(positions, kv_cache.shape[2], self._interleave)
            kv = torch.zeros(length, kv_cache.shape[1], kv_cache.shape[3], dtype=kv_cache.dtype)
            blocks = attn_metadata.block_table[request][block[here]].long()
            kv[here] = kv_cache[blocks, :, at[here]]
            kv = get_dcp_group().all_reduce(kv)  # each token is of one rank, and 0 elsewhere
            keys, values = kv.transpose(0, 1).chunk(2, dim=-1)
            seen = positions[None] <= torch.arange(length - (end - first), length)[:, None]
            output[first:end] = torch.nn.functional.scaled_dot_product_attention(
                query[first:end].transpose(0, 1)[None],
                keys[None],
                values[None],
                attn_mask=seen,
                scale=self.scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
        return output


class PlainBackend(CPUAttentionBackend):  # type: ignore[misc]
    @staticmethod
    def get_impl_cls() -> type[PlainAttention]:
        return PlainAttention


def put_in() -> None:
    """Let engines of the CPU share out each request's tokens among ranks."""

    def slots(self: Any, num_reqs: int, query_start_loc: Any, positions: Any) -> None:
        counts = query_start_loc[1 : num_reqs + 1] - query_start_loc[:num_reqs]
        requests = torch.repeat_interleave(torch.arange(num_reqs), counts.long())
        interleave = self.cp_kv_cache_interleave_size
        block, at, here = places(positions[: len(requests)], self.block_size, interleave)
        blocks = self.block_table.gpu[requests, block].long()
        self.slot_mapping.gpu.fill_(-1)
        self.slot_mapping.gpu[: len(requests)][here] = (blocks * self.block_size + at)[here]

    BlockTable.compute_slot_mapping = slots
    name = f"{PlainBackend.__module__}.{PlainBackend.__qualname__}"
    CpuPlatform.get_attn_backend_cls = classmethod(lambda cls, *args, **kwargs: name)
