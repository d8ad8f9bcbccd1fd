"""AdapterMarks: the mark in a request's keys that stands for the weights of its LoRA adapter."""

from __future__ import annotations

import hashlib
import logging
import secrets
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from tiers.concurrency.executors import io_executor
from tiers.engine.identity.digests import Digests, FileChanged
from tiers.engine.identity.weights import WEIGHTS

logger = logging.getLogger(__name__)


MOMENT = 0.05
"""Seconds that a request waits for its adapter's digest; small adapters are digested by then.

The engine waits, too. So a request does not wait while another adapter is being digested: many new
adapters at once cost the engine one such wait."""


class AdapterMarks:
    """Makes the marks of LoRA adapters. Used by the scheduler's thread.

    Block hashes contain an adapter's name and path. Other weights can be put there later, while
    old blocks are still in a tier. So the mark is a digest of all the adapter's files, read once
    per adapter on a background thread. Requests share nothing until the digest is known. They also
    share nothing after the files have changed, since nobody knows which weights the engine loaded.
    The KV of an adapter that is not a local folder is shared within this engine only.
    """

    def __init__(self) -> None:
        self._marks: dict[str, tuple[_Stamps, Future[bytes]]] = {}
        self._changed: set[str] = set()
        self._reader = io_executor(1, "adapters")

    def __call__(self, request: Any) -> bytes:
        """Return the 16 bytes of a request's mark; none for a request without an adapter."""
        adapter = getattr(request, "lora_request", None)
        if adapter is None:
            return b""
        path = str(adapter.lora_path)
        folder = Path(path).expanduser()
        try:
            stamps = _stamps(folder)
            if path not in self._marks:
                self._marks[path] = stamps, self._read(folder, adapter.lora_name, stamps)
            first_seen, mark = self._marks[path]
            if stamps != first_seen:
                self._give_up(path, adapter.lora_name, "has changed")
            known = path not in self._changed and mark.done()
            return mark.result() if known else secrets.token_bytes(16)
        except (OSError, FileChanged) as error:
            self._give_up(path, adapter.lora_name, f"can't be read ({error})")
            return secrets.token_bytes(16)

    def _read(self, folder: Path, name: str, stamps: _Stamps) -> Future[bytes]:
        """Begin to digest the adapter in `folder`, and wait a moment for the digest."""
        if folder.is_dir():
            is_behind = any(not mark.done() for _, mark in self._marks.values())
            mark = self._reader.submit(_adapter_digest, folder, stamps)
            if not is_behind:
                wait([mark], MOMENT)
            return mark
        logger.info(
            "LoRA adapter %r is no local folder: only this engine finds its KV. To share it, load "
            "the adapter from a folder.",
            name,
        )
        alone: Future[bytes] = Future()
        alone.set_result(secrets.token_bytes(16))
        return alone

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


def _adapter_digest(folder: Path, stamps: _Stamps) -> bytes:
    """Digest the adapter's files. Raises OSError; FileChanged if they differ from `stamps`."""
    whole = hashlib.blake2b(digest_size=16)
    digests = Digests(None)
    for path in _adapter_files(folder):
        whole.update(f"{path.name}:{digests.of(path)}\n".encode())
    if _stamps(folder) != stamps:
        raise FileChanged("its files changed before they were read")
    return whole.digest()
