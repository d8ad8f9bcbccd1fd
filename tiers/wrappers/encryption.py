"""Encryption of what a store is given: who reads it learns nothing, who writes it plants nothing.

A block is sealed with AES-256-GCM under a nonce of 96 random bits, with its key, which begins with
the namespace, and its length as associated data: what is not the very block that was stored under
that very key, by someone with the encryption key, does not open. Names are hidden too, since a
block's key is a digest of the prompt that a reader could guess: a store sees keyed digests of them.

NIST SP 800-38D allows 2^32 seals under one key with random nonces: 8 PiB of blocks of 2 MiB.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tiers.block import NAMESPACE_BYTES
from tiers.errors import TierError
from tiers.pool import slot_stride
from tiers.scratch import Scratch
from tiers.store import (
    Block,
    Clear,
    Damages,
    LocalIndex,
    Measured,
    TierStore,
    Touch,
    Usage,
    with_capabilities,
)
from tiers.tally import Tally

NONCE_BYTES = 12
TAG_BYTES = 16
SCRATCH_BYTES = 32 << 20
"""Sealed bytes that a verb holds at once."""


def sealed_bytes(payload_bytes: int) -> int:
    """Bytes of a sealed payload, in whole pages: what direct I/O asks for."""
    return slot_stride(NONCE_BYTES + payload_bytes + TAG_BYTES)


class Cipher:
    """One encryption key of 32 bytes, and what follows from it."""

    def __init__(self, key: bytes) -> None:
        self._name_key = _derive(key, b"kvtiers names")
        self._spaces: dict[bytes, bytes] = {}
        self._aead = AESGCM(_derive(key, b"kvtiers blocks"))

    def name(self, key: bytes) -> bytes:
        """What the store calls a block."""
        return self.space(key[:NAMESPACE_BYTES]) + self._digest(key, 32)

    def space(self, namespace: bytes) -> bytes:
        """What the names of a namespace begin with; an engine has one for each rank."""
        found = self._spaces.get(namespace)
        if found is None:
            found = self._spaces[namespace] = self._digest(namespace, NAMESPACE_BYTES)
        return found

    def _digest(self, data: bytes, size: int) -> bytes:
        return hashlib.blake2b(data, key=self._name_key, digest_size=size).digest()

    def seal(self, block: Block, out: memoryview) -> None:
        """Fill `out`, of `sealed_bytes`, with the sealed payload."""
        end = NONCE_BYTES + len(block.payload) + TAG_BYTES
        out[:NONCE_BYTES] = nonce = secrets.token_bytes(NONCE_BYTES)
        self._aead.encrypt_into(nonce, block.payload, _claim(block), out[NONCE_BYTES:end])
        out[end:] = bytes(len(out) - end)

    def open(self, block: Block, sealed: memoryview) -> bool:
        """Fill the block's payload with what was sealed for it; False: it was not."""
        end = NONCE_BYTES + len(block.payload) + TAG_BYTES
        nonce, data = bytes(sealed[:NONCE_BYTES]), sealed[NONCE_BYTES:end]
        try:
            self._aead.decrypt_into(nonce, data, _claim(block), block.payload)
        except InvalidTag:
            return False
        return True


def _derive(key: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(key=key, person=purpose.ljust(16), digest_size=32).digest()


def _claim(block: Block) -> bytes:
    return len(block.payload).to_bytes(8, "little") + block.key


class EncryptedStore:
    """A TierStore over another, opened for payloads of `sealed_bytes`. Made by `encrypted`.

    The first cipher seals; a block that is not found under its name of the first is looked for
    under those of the others. Thread-safe, as the other is.
    """

    def __init__(self, store: TierStore, ciphers: Sequence[Cipher], payload_bytes: int) -> None:
        self._store: Any = store
        self._inner = store if isinstance(store, Damages) else None
        self._ciphers = ciphers
        self._sealed = sealed_bytes(payload_bytes)
        self._at_once = max(1, SCRATCH_BYTES // self._sealed)
        self._scratch = Scratch(self._at_once * self._sealed)
        self._damaged = Tally()

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Ask for names of every cipher."""
        return self._under_any(self._store.has, keys)

    def _under_any(
        self, ask: Callable[[Sequence[bytes]], list[bool]], keys: Sequence[bytes]
    ) -> list[bool]:
        held = [False] * len(keys)
        for cipher in self._ciphers:
            places = [place for place, found in enumerate(held) if not found]
            if places:
                answers = ask([cipher.name(keys[place]) for place in places])
                for place, answer in zip(places, answers, strict=True):
                    held[place] = answer
        return held

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """Seal and store, some at a time."""
        cipher = self._ciphers[0]
        stored: list[bool] = []
        for part, scratch in self._parts(blocks):
            sealed = [Block(cipher.name(b.key), s) for b, s in zip(part, scratch, strict=True)]
            for block, to in zip(part, sealed, strict=True):
                cipher.seal(block, to.payload)
            try:
                stored += self._store.put(sealed)
            except TierError:
                if not any(stored):
                    raise
                return stored + [False] * (len(blocks) - len(stored))
        return stored

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        """Load and open, some at a time; what does not open is dropped."""
        got: list[bool] = []
        for part, scratch in self._parts(blocks):
            found = [False] * len(part)
            for cipher in self._ciphers:
                places = [place for place, done in enumerate(found) if not done]
                if places:
                    for place in self._open(cipher, part, scratch, places):
                        found[place] = True
            got += found
        return got

    def _open(
        self,
        cipher: Cipher,
        blocks: Sequence[Block],
        scratch: Sequence[memoryview],
        places: Sequence[int],
    ) -> list[int]:
        sealed = [Block(cipher.name(blocks[p].key), scratch[p]) for p in places]
        there = [p for p, ok in zip(places, self._store.get(sealed), strict=True) if ok]
        opened = [p for p in there if cipher.open(blocks[p], scratch[p])]
        planted = [cipher.name(blocks[p].key) for p in there if p not in opened]
        if planted:
            self._damaged.count("sealed", len(planted))
            # What it loaded stays loaded, should it take no edits now.
            with suppress(TierError):
                self._store.drop(planted)
        return opened

    def _parts(self, blocks: Sequence[Block]) -> Iterator[tuple[Sequence[Block], list[memoryview]]]:
        for start in range(0, len(blocks), self._at_once):
            part = blocks[start : start + self._at_once]
            with self._scratch.taken() as memory:
                size = self._sealed
                yield part, [memory[i * size : (i + 1) * size] for i in range(len(part))]

    def drop(self, keys: Sequence[bytes]) -> None:
        """Drop the names of every cipher."""
        self._store.drop([cipher.name(key) for key in keys for cipher in self._ciphers])

    def damaged(self) -> int:
        """Blocks found that did not open, and those that the store itself found damaged."""
        inner = 0 if self._inner is None else self._inner.damaged()
        return inner + self._damaged.total

    def close(self) -> None:
        """Close the store."""
        self._store.close()


class _Peek(EncryptedStore):
    def peek(self, keys: Sequence[bytes]) -> list[bool]:
        """As `has`."""
        return self._under_any(self._store.peek, keys)


class _Touch(EncryptedStore):
    def touch(self, keys: Sequence[bytes]) -> None:
        """Touch the names of every cipher."""
        self._store.touch([cipher.name(key) for key in keys for cipher in self._ciphers])


class _Clear(EncryptedStore):
    def clear(self, namespace: bytes) -> bool:
        """Clear the namespace of every cipher, one after the other."""
        return any(self._store.clear(cipher.space(namespace)) for cipher in self._ciphers)


class _Measured(EncryptedStore):
    def usage(self) -> Usage:
        """As the store: of sealed blocks."""
        return cast(Usage, self._store.usage())


_CAPABILITIES: tuple[tuple[type, type[EncryptedStore]], ...] = (
    (LocalIndex, _Peek),
    (Touch, _Touch),
    (Clear, _Clear),
    (Measured, _Measured),
)


def encrypted(store: TierStore, keys: Sequence[bytes], payload_bytes: int) -> EncryptedStore:
    """Encrypt what `store`, which the result owns, is given; with exactly its capabilities, and
    that of counting damage. `keys`: 32 bytes each; the first seals, all open."""
    made = with_capabilities(EncryptedStore, store, _CAPABILITIES)
    return made(store, [Cipher(key) for key in keys], payload_bytes)
