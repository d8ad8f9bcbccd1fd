"""DeepSeek V4 on the CPU with what vLLM lacks there: where a step's tokens lie, without Triton.

Its attention on the CPU has kernels of its own, which read paged KV. What says where that lies is
computed by Triton, which has no compiler for CPUs. For Model Runner V2 its interpreter runs all.
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import torch
from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.mla import compressor_utils, indexer, sparse_swa
from vllm.v1.attention.ops import metadata

UNUSED = (
    (sparse_swa, "_COMPUTE_SWA_INDICES_AND_LENS_KERNEL"),
    (sparse_swa, "_COMPUTE_PREFILL_METADATA_KERNEL"),
    (indexer, "_BUILD_PREFILL_CHUNK_METADATA_KERNEL"),
)
"""Their results go to kernels of devices, and to the indexer's, which is asked for prompts alone
that have more than 512 states of four tokens."""


def requests_of(starts: Any, out: Any, mapped: int, tokens: int) -> Any:
    """The request of each token of a step."""
    found = torch.searchsorted(starts[1:].contiguous(), torch.arange(mapped).int(), right=True)
    out[:mapped], out[mapped:tokens] = found.int(), 0
    return out[:tokens]


def slots_of_states(
    out: Any, slots: Any, starts: Any, lengths: Any, table: Any, size: int, ratio: int, *more: int
) -> None:
    """Where each token's state goes, which the last of `ratio` tokens writes; -1: nowhere."""
    for request, blocks in enumerate(table):
        first, end = int(starts[request]), int(starts[request + 1])
        positions = torch.arange(int(lengths[request]) - (end - first), int(lengths[request]))
        state = positions // ratio
        found = blocks[(state // size).clamp(max=len(blocks) - 1)].long() * size + state % size
        is_last = ((positions + 1) % ratio == 0) & (slots[first:end] != -1)
        out[first:end] = torch.where(is_last, found, -1)


def put_in() -> None:
    """Have vLLM use these, and chunks of prompts and its own prefix cache without AMX, too: what it
    computes here looks at what lies before a chunk."""
    # vLLM 0.32 asks the CPU's for kinds of layers that it does not name.
    nothing: dict[str, None] = defaultdict(lambda: None)
    DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = lambda self, tokens: nothing
    check = CpuPlatform.check_and_update_config

    def checked(config: Any) -> None:
        has_amx = torch.cpu._is_amx_tile_supported
        torch.cpu._is_amx_tile_supported = lambda: True
        check(config)
        torch.cpu._is_amx_tile_supported = has_amx

    CpuPlatform.check_and_update_config = staticmethod(checked)
    if "TRITON_INTERPRET" not in os.environ:
        metadata.compute_token_to_req_indices = requests_of
        compressor_utils._COMPRESSED_SLOT_MAPPING_KERNEL = slots_of_states
        for module, name in UNUSED:
            setattr(module, name, lambda *args, **more: None)
