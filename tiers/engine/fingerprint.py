"""All that makes KV interchangeable between engines, read from an engine's configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SAMPLE_BYTES = 1 << 16
SAMPLES = 16
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_VOLATILE = ("_name_or_path", "transformers_version")


def model_facts(vllm_config: Any, engine_version: str, hash_seed: str) -> dict[str, str]:
    """Name every fact, except layout and rank, on which a block's bytes or its hash depend.

    Two engines share blocks only where all of them agree, so that a changed model, weights, dtype
    or engine version starts with an empty cache and never meets KV of another.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    facts = {
        "engine": engine_version,
        "model": str(model.model),
        "revision": str(model.revision),
        "commit": str(getattr(model.hf_config, "_commit_hash", None)),
        "config": config_digest(model.hf_config),
        "weights": weights_digest(Path(model.model)),
        "weights_from": str(getattr(model, "model_weights", "")),
        "long_rope": _long_rope(model),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_dtype": str(cache.cache_dtype),
        "hash": str(cache.prefix_caching_hash_algo),
        "hash_seed": hash_seed,
    }
    load_format = str(vllm_config.load_config.load_format)
    if "dummy" in load_format:
        facts["weights"] = f"random:{model.seed}"
    return facts


def config_digest(hf_config: Any) -> str:
    """Digest of a model's architecture and its overrides."""
    fields = {k: v for k, v in hf_config.to_dict().items() if k not in _VOLATILE}
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _long_rope(model: Any) -> str:
    """Which of two sets of rotary factors a model of that kind (Phi-3) takes: vLLM chooses by the
    longest request it is started for. "" for other models."""
    text = model.hf_text_config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    name = "original_max_position_embeddings"
    original = rope.get(name) or getattr(text, name, None)
    return str(model.max_model_len > int(original)) if original else ""


def weights_digest(model: Path) -> str:
    """Digest of a local model's weights, from their sizes and samples of every file.

    Reads `SAMPLES` pieces of 64 KiB of each file: fine-tuned weights differ nearly everywhere,
    and reading all of a large model would take minutes. "" for a model that is neither a local
    folder nor a file; its name, revision and commit stand for its weights. Raises OSError for a
    file that can't be read.
    """
    if not model.exists():
        return ""
    files = model.iterdir() if model.is_dir() else [model]
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(p for p in files if p.suffix in WEIGHTS):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        for piece in _samples(path, size):
            digest.update(piece)
    return digest.hexdigest()


def _samples(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        for i in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * i // (SAMPLES - 1))
            yield file.read(SAMPLE_BYTES)
