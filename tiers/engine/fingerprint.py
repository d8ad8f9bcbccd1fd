"""All that makes KV interchangeable between engines, read from an engine's configuration."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

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


class AdapterMarks:
    """What a request's KV owes to its LoRA adapter, beside the adapter's name and path.

    Those are in the block hashes, but other weights can be put under them, and old blocks outlive
    that in a tier. So the mark is a digest of the adapter's files, read on the scheduler's thread
    once per adapter (a millisecond or two). Files that change while the engine runs leave open
    which weights it has loaded: from then on no request with that adapter shares anything. An
    adapter that is no local folder is shared by the requests of this engine alone.
    """

    def __init__(self) -> None:
        self._marks: dict[str, tuple[_Stamps, bytes]] = {}
        self._changed: set[str] = set()

    def __call__(self, request: Any) -> bytes:
        """16 bytes; none for a request without an adapter."""
        adapter = getattr(request, "lora_request", None)
        if adapter is None:
            return b""
        path = str(adapter.lora_path)
        folder = Path(path).expanduser()
        try:
            stamps = _stamps(folder)
            if path not in self._marks:
                known = _adapter_digest(folder) if stamps else secrets.token_bytes(16)
                self._marks[path] = stamps, known
        except OSError as error:
            self._give_up(path, adapter.lora_name, f"can't be read ({error})")
            return secrets.token_bytes(16)
        first_seen, mark = self._marks[path]
        if stamps != first_seen:
            self._give_up(path, adapter.lora_name, "has changed")
        return secrets.token_bytes(16) if path in self._changed else mark

    def _give_up(self, path: str, name: str, why: str) -> None:
        if path not in self._changed:
            logger.warning(
                "LoRA adapter %r %s, under %s: its KV is not cached until the engine is started "
                "again, or the adapter comes from another path.",
                name,
                why,
                path,
            )
        self._changed.add(path)


_Stamps = tuple[tuple[str, int, int], ...]


def _adapter_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.suffix in (*WEIGHTS, ".json"))


def _stamps(folder: Path) -> _Stamps:
    stats = [(path.name, path.stat()) for path in _adapter_files(folder)]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _adapter_digest(folder: Path) -> bytes:
    digest = hashlib.blake2b(weights_digest(folder).encode(), digest_size=16)
    for path in _adapter_files(folder):
        if path.suffix == ".json":
            digest.update(path.read_bytes())
    return digest.digest()
