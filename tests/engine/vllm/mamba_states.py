"""Mamba 2 on the CPU with what its kernel lacks there: the states within a prompt.

vLLM's kernels for devices return the state behind each of their chunks, from which it keeps the one
at the last block boundary of a prompt. Its kernel for the CPU returns the last state alone, and an
engine that caches prefixes ends.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.model_executor.layers.mamba.ops import ssd_combined

_scan = ssd_combined._mamba_chunk_scan_combined_fwd


def scan(x: Any, dt: Any, a: Any, b: Any, c: Any, chunk_size: int, out: Any, **more: Any) -> Any:
    """As vLLM's, which is asked for one chunk after another where their states are wanted."""
    if not more.pop("return_intermediate_states"):
        return _scan(x, dt, a, b, c, chunk_size, out, **more)
    starts, of_sequence = more["cu_chunk_seqlens"].tolist(), more["seq_idx"].tolist()
    given = more["initial_states"]
    states: list[Any] = []
    for chunk, sequence in enumerate(of_sequence):
        part = slice(starts[chunk], starts[chunk + 1])
        before = given[sequence : sequence + 1] if given is not None else None
        if chunk and of_sequence[chunk - 1] == sequence:
            before = states[-1]
        more["initial_states"] = before
        more["cu_seqlens"] = torch.tensor([0, part.stop - part.start], dtype=torch.int32)
        states.append(_scan(x[part], dt[part], a, b[part], c[part], chunk_size, out[part], **more))
    return torch.cat(states)


def keep(
    checkpoint: Any,
    chunks: Any,
    x: Any,
    conv_state: Any,
    chunk_states: Any,
    ssm_state: Any,
    starts: Any,
    *,
    state_len: int,
) -> None:
    """Write the states at block boundaries within prompts to their paged blocks."""
    for row, tokens in enumerate(checkpoint.checkpoint_offsets.tolist()):
        if tokens:
            block, end = int(checkpoint.state_indices[row]), int(starts[row]) + tokens
            conv_state[block, :, :state_len] = x[:, end - state_len : end]
            ssm_state[block] = chunk_states[chunks[row]]


def put_in() -> None:
    """Have vLLM use these."""
    ssd_combined._mamba_chunk_scan_combined_fwd = scan
    if "TRITON_INTERPRET" not in os.environ:  # there vLLM's own kernel writes the states
        mamba_mixer2.store_prefill_checkpoint = keep
