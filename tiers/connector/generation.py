"""Generation: what a reset changes in every key, so that older blocks are never found again."""

from __future__ import annotations

import secrets

GENERATION_BYTES = 16


class Generation:
    """The end of every key that a tier's scheduler half makes; empty until the first reset.

    Workers need not be told: the keys in their orders carry it, into every store and back out of
    it. It is drawn by chance, since a count would meet the same count of another replica, or of
    this engine before a restart, with other weights under it.
    """

    def __init__(self) -> None:
        self._tag = b""

    def renew(self) -> None:
        """Begin another; keys of all earlier ones are no longer made."""
        self._tag = secrets.token_bytes(GENERATION_BYTES)

    def key(self, block: bytes) -> bytes:
        """A block's key in this generation."""
        return block + self._tag

    def made(self, key: bytes) -> bool:
        """Whether a key is of this generation."""
        return key.endswith(self._tag)

    def block(self, key: bytes) -> bytes:
        """What `key` was told of the block. Only for keys of this generation."""
        return key[: len(key) - len(self._tag)]
