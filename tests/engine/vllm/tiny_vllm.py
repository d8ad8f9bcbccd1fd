"""What tests of a real vLLM engine share: the tiny model, prompts, and what a run showed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.engine_models import STATES
from tests.engine.vllm.recipes import recipe

BLOCK_TOKENS = 32
Batch = Sequence[tuple[Any, ...]]

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKEN_BYTES = 4 * 2 * 2 * 32 * 4
"""KV of a token of this model: layers, K and V, heads, their size, float32."""
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES

WINDOW = 96
GEMMA = {
    **LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 32,
    # Else the last token outweighs all others, so that an answer repeats it.
    "tie_word_embeddings": False,
}
"""Layers with windows and without: several KV cache groups, which share their tensors."""

GEMMA_4 = {
    **GEMMA,
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "global_head_dim": 64,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 1000,
    "hidden_size_per_layer_input": 16,
}
"""As Gemma, whose heads are larger without windows, and whose last layers use the KV of others."""

MISTRAL = {
    **LLAMA,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": WINDOW,
}
"""Windows only: one KV cache group."""

QWEN_3 = {
    **LLAMA,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_key_value_heads": 1,
}
"""One head of KV: tensor-parallel ranks have the same KV, unless they share out tokens."""

QWEN_NEXT = {
    **STATES,
    **LLAMA,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "torch_dtype": "bfloat16",
}
"""Three layers of linear attention, which keep states, and one of full attention."""
STATE_BLOCK_TOKENS = 512
"""Tokens of its blocks, or a few more: as many as make the KV of attention as long as a state."""
GRANITE = {
    **LLAMA,
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "layer_types": ["mamba", "mamba", "mamba", "attention"],
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 64,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 128,
    "position_embedding_type": "nope",
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}
"""Three layers of Mamba 2, whose states a step leaves at block boundaries within a prompt, too."""
DEEPSEEK = {
    **LLAMA,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 64,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "tie_word_embeddings": False,
}
"""Latent attention: each tensor-parallel rank has all of the KV."""

DEEPSEEK_V4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 2,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4],
    "compress_rope_theta": 160000.0,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 2048},
    "index_topk": 512,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "num_hash_layers": 0,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "expert_dtype": "fp8",
    "num_nextn_predict_layers": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
"""Windows, and states of 4 and of 128 tokens: five KV cache groups, whose blocks have 4 to 256
tokens and lie in one allocation, each group's in its own way."""


class EngineFailed(AssertionError):
    """An engine did not start, or ended before it had answered; the text is its log."""


@dataclass(frozen=True)
class Run:
    """What one engine answered, how soon (`ttft`: seconds to the first token), what its tiers
    counted, how it explained its requests, its status, and the chain that it runs."""

    tokens: list[list[list[int]]]
    cached: list[list[int]]
    ttft: list[list[float]]
    tiers: dict[str, dict[str, float]]
    preemptions: float
    external_hits: float
    drafts: float
    """Tokens that were guessed; and of these:"""
    drafts_accepted: float
    log: str
    explained: list[dict[str, Any]]
    status: dict[str, Any]
    running: dict[str, Any]
    logits: list[list[list[list[float]]]]
    """By batch, request, and token of the answer."""
    chunks: list[list[tuple[int, int]]]
    """First token and end of each chunk of more than a token, by batch, where each is preempted."""
    params: list[list[dict[str, Any] | None]]
    """The transfer parameters that came with each answer."""

    def loaded(self) -> dict[str, float]:
        """Tokens that came from each tier that served any."""
        tokens = {tier: self.count(tier, "loaded_tokens") for tier in self.tiers}
        return {tier: count for tier, count in tokens.items() if count}

    def count(self, tier: str, counter: str) -> float:
        return self.tiers.get(tier, {}).get(counter, 0)


def documents(count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Prompts of random tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(3, 1000) for _ in range(length)] for _ in range(count)]


def hosted(*tiers: dict[str, Any], **chain: Any) -> dict[str, Any]:
    """The configuration of vLLM's own OffloadingConnector with a chain of ours."""
    fixed = {"version": 1, "load_when": "always", "staging": "3MiB"}
    return recipe(
        "Inside",
        chain={**fixed, "tiers": list(tiers), **chain},
        spec_name="HostedOnCpu",
        spec_module_path="tests.engine.vllm.own_offloading",
    )


def under_own_spec(store: dict[str, Any], host_bytes: int) -> dict[str, Any]:
    """The configuration of vLLM's own tiers with a store of ours among them."""
    own = {"spec_name": "OffloadingOnCpu", "cpu_bytes_to_use": host_bytes}
    transfer = recipe("Inside", 1, store=store, **own)
    transfer["kv_connector_extra_config"]["spec_module_path"] = "tests.engine.vllm.own_offloading"
    return transfer
