"""What does a reset change? The generation in each key, so that older blocks are not found."""

from __future__ import annotations

import hashlib
import secrets

GENERATION_BYTES = 16


class Generation:
    """The end of every key that a tier's scheduler half makes; mostly empty until the first reset.

    The keys in workers' orders carry it, into every store and back out of it. It is random: a
    counter would repeat in another replica, or after a restart, with other weights. So nobody else
    makes a key of a generation that is not empty, nor loads its blocks once it is over.
    """

    def __init__(self, lasts: bool = False, is_own: bool = False) -> None:
        """`lasts`: resets change nothing, since the weights don't. `is_own`: the first one is this
        engine's alone, too."""
        self.lasts = lasts
        self.tag = b""
        """What the keys of this generation end with."""
        self._over = b""
        self._is_used = True
        if is_own:
            self.renew()

    def renew(self) -> bytes:
        """Begin another, and return the one before; keys of all earlier ones are no longer made.

        The tiers of a chain, which are reset one after the other, begin one between them.
        """
        if self._is_used:
            self._over, self.tag = self.tag, secrets.token_bytes(GENERATION_BYTES)
            self._is_used = False
        return self._over

    def key(self, block: bytes) -> bytes:
        return block + self.in_use()

    def in_use(self) -> bytes:
        """The tag, of which something is made or computed."""
        self._is_used = True
        return self.tag

    def owns(self, key: bytes) -> bool:
        return key.endswith(self.tag)


def space_of(namespace: bytes, generation: bytes) -> bytes:
    """The prefix of a store's names for the blocks of a rank, in this generation.

    Each generation has another, of the namespace's length, so that a store can be cleared of one.
    """
    if not generation:
        return namespace
    return hashlib.blake2b(namespace + generation, digest_size=len(namespace)).digest()
