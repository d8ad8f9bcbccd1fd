"""What is a LoRA adapter known by? The weights that a worker's engine has loaded."""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from tiers.contract.adapters import LoadedAdapter, LoadedAdapters
from tiers.engine.digesting import Unknown, feed
from tiers.engine.identity.adapter_files import folder_stamp, settled_stamp

logger = logging.getLogger(__name__)

MOST_NAMES = 1 << 16
"""Adapters that are told apart; KV of further ones is not cached."""

NameOf = Callable[[Any], bytes]
"""What stands for an adapter in the engine's block hashes, of a request of the engine's to load."""


def name_of(adapter: Any, has_path: bool = True) -> bytes:
    """Return what stands for a LoRA adapter in the engine's block hashes. `has_path`: they contain
    its path."""
    text = f"{adapter.lora_name}\0{adapter.lora_path if has_path else ''}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


@dataclass
class _Weights:
    """An adapter's weights in the engine's memory, while they are there."""

    ref: weakref.ref[Any]
    content: bytes
    stamp: bytes


class SeenAdapters(LoadedAdapters):
    """Digests the weights of each adapter when the engine has loaded them.

    Block hashes contain an adapter's name, and its path perhaps. Once other weights came under one
    name, the engine's own prefix cache may hold KV of either, and nothing tells which. So nothing
    of requests with that name is stored from then on.

    Used by the worker's thread, which loads adapters and runs the steps.
    """

    def __init__(self, name_of: NameOf = name_of) -> None:
        self._name_of = name_of
        self._loaded: dict[bytes, LoadedAdapter] = {}
        self._new: set[bytes] = set()
        self._weights: dict[int, _Weights] = {}
        self._said: set[str] = set()

    def before(self, adapter: Any) -> bytes:
        """Return the stamp of the files that the engine is about to read."""
        return settled_stamp(str(adapter.lora_path))

    def after(self, adapter: Any, weights: Any, stamp: bytes = b"") -> None:
        """Note which weights an engine uses for an `adapter` from now on. `stamp`: that of before
        it loaded them, if it did; nothing may have changed since."""
        name, found = self._name_of(adapter), self._of(weights)
        if found is None:
            same = bool(stamp) and folder_stamp(str(adapter.lora_path)) == stamp
            found = self._keep(weights, stamp if same else b"")
        before = self._loaded.get(name)
        content = found.content
        if before is None and len(self._loaded) >= MOST_NAMES:
            self._say("more LoRA adapters are used than kvtiers tells apart: further ones' KV")
            return
        if before is not None and before.content != content:
            content = b""
        if not content:
            self._say(f"LoRA adapter {adapter.lora_name!r} {_why(found)}: its KV")
        now = LoadedAdapter(adapter.lora_int_id, content, found.stamp)
        if now != before:
            self._loaded[name] = now
            self._new.add(name)

    def report(self) -> dict[bytes, LoadedAdapter]:
        new, self._new = self._new, set()
        return {name: self._loaded[name] for name in new}

    def may_store(self, adapter: bytes) -> bool:
        loaded = self._loaded.get(adapter)
        return loaded is not None and bool(loaded.content)

    def _of(self, weights: Any) -> _Weights | None:
        known = self._weights.get(id(weights))
        return known if known is not None and known.ref() is weights else None

    def _keep(self, weights: Any, stamp: bytes) -> _Weights:
        here = id(weights)
        ref = weakref.ref(weights, lambda _: self._weights.pop(here, None))
        kept = self._weights[here] = _Weights(ref, weights_digest(weights), stamp)
        return kept

    def _say(self, what: str) -> None:
        """Log each warning once."""
        if what not in self._said:
            self._said.add(what)
            logger.warning("%s is not cached until the engine is started again", what)


def _why(found: _Weights) -> str:
    if not found.content:
        return "is in a form that kvtiers does not know"
    return (
        "was loaded again with other weights, and the engine's own prefix cache does not "
        "distinguish them (load changed weights under another name, from another path)"
    )


def weights_digest(weights: Any) -> bytes:
    """Digest all tensors and values of an adapter's weights but its number; none if some are of a
    kind that does not show its content."""
    digest = xxhash.xxh3_128()
    try:
        values = {name: value for name, value in vars(weights).items() if name != "id"}
        tensors = feed(digest, _plain(values))
    except (Unknown, TypeError, ValueError, RuntimeError):
        return b""
    return digest.digest() if tensors else b""


def _plain(value: Any) -> Any:
    """Return a mapping's objects as mappings of what they have."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, torch.Tensor) or not hasattr(value, "__dict__"):
        return value
    return {"": type(value).__name__, **vars(value)}
