"""KV bytes of a token, for some models by name."""

from __future__ import annotations

from typing import NamedTuple


class KvShape(NamedTuple):
    """What a model keeps of a token in each of its layers."""

    layers: int
    numbers: int
    """Of a layer: 2 (keys and values) x KV heads x their size; for MLA the compressed row."""


KV_SHAPES = {
    "deepseek-v3": KvShape(61, 512 + 64),
    "llama-3.1-8b": KvShape(32, 2 * 8 * 128),
    "llama-3.1-70b": KvShape(80, 2 * 8 * 128),
    "llama-3.1-405b": KvShape(126, 2 * 8 * 128),
    "mistral-7b-v0.3": KvShape(32, 2 * 8 * 128),
    "mixtral-8x7b": KvShape(32, 2 * 8 * 128),
    "qwen2.5-7b": KvShape(28, 2 * 4 * 128),
    "qwen2.5-72b": KvShape(80, 2 * 8 * 128),
    "qwen3-8b": KvShape(36, 2 * 8 * 128),
    "qwen3-32b": KvShape(64, 2 * 8 * 128),
    "qwen3-30b-a3b": KvShape(48, 2 * 4 * 128),
    "qwen3-235b-a22b": KvShape(94, 2 * 4 * 128),
}
"""From the `config.json` that each model is published with: `num_hidden_layers`,
`num_key_value_heads` and `head_dim`, or `kv_lora_rank` and `qk_rope_head_dim`."""


def kv_bytes_per_token(model: str) -> int:
    """KV bytes of a token in 16 bits, over all layers and ranks. Raises KeyError."""
    shape = KV_SHAPES[model]
    return shape.layers * shape.numbers * 2
