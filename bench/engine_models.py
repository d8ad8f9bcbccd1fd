"""Models of random weights whose answers depend on every part of a prompt, and their shapes.

Weights as vLLM's `load_format=dummy` makes them are all but zero: each token is then as likely as
any other, and whatever KV the engine reads the answer is the same, wrong KV's too. Here they are
large enough that attention looks somewhere, and the same in every session.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

INITIALIZER_RANGE = 0.3
"""Standard deviation of all weights of a model that is 64 wide: attention has favourites, yet looks
at more than one."""
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 131072,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
TINY = {**SMALL, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
WINDOWS: dict[str, Any] = {
    **SMALL,
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
    "sliding_window": 512,
    "query_pre_attn_scalar": 64,
}
"""Layers with windows and without: several KV cache groups, which share their tensors."""
LATENT: dict[str, Any] = {
    **SMALL,
    "model_type": "deepseek_v2",
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
"""Latent attention, and no layer with experts."""
STATES: dict[str, Any] = {
    **SMALL,
    "model_type": "qwen3_next",
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1,
}
"""Layers of linear attention, which keep states, and one of full attention."""
LARGE: dict[str, Any] = {
    **SMALL,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
"""As Llama 3.2 3B but for its vocabulary: 112 KiB of KV a token."""


def write_model(folder: Path, config: dict[str, Any], dtype: str, device: str = "cpu") -> Path:
    """Write the text model of a configuration to `folder`, drawn on a device; the folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    spread = INITIALIZER_RANGE * (64 / config["hidden_size"]) ** 0.5
    made = AutoConfig.for_model(**{"initializer_range": spread, **config})
    torch.manual_seed(0)
    with torch.device(device):
        whole = AutoModelForCausalLM.from_config(made, dtype=getattr(torch, dtype))
    with torch.no_grad():
        _remember(whole)
    whole.save_pretrained(folder)
    return folder


FACTORS = {"embed_tokens": 0.05, "down_proj": 0.01, "out_proj": 20.0, "o_proj": 20.0}


def _remember(model: Any) -> None:
    """Let the states of linear attention last and outweigh the last tokens: made at random, they
    forget a prefix within a hundred tokens."""
    weights = dict(model.named_parameters())
    if not any(name.endswith("A_log") for name in weights):
        return
    for name, parameter in weights.items():
        if name.endswith("A_log"):
            parameter.fill_(-9.0)
        for part, factor in FACTORS.items():
            if part in name:
                parameter.mul_(factor)
