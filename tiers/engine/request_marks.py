"""What a request's KV owes to more than its tokens and the engine's facts: a mark in its keys."""

from __future__ import annotations

import hashlib
import logging
import secrets
from pathlib import Path
from typing import Any

from tiers.engine.fingerprint import weights_digest
from tiers.engine.identity.weights import WEIGHTS

logger = logging.getLogger(__name__)


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
