"""A digest of an adapter's weights, quick enough for the scheduler's thread."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from tiers.engine.identity.weights import WEIGHTS

SAMPLE_BYTES = 1 << 16
SAMPLES = 16


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
