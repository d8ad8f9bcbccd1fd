"""KeyedIds: what stands in a trace for blocks and names, which only the key's owner can make."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

ID_BITS = 53
"""So that readers of JSON in any language get ids whole: many keep numbers as doubles. Among ten
million different blocks there are two of one id with a chance of 0.6 percent."""
_DIGEST_BYTES = 8


class KeyedIds:
    """Makes ids of blocks and digests of names by keyed BLAKE2b (RFC 7693). Who has the trace
    without the key can't tell whether a prompt or a name that they guess is in it."""

    def __init__(self, key: bytes, facts: bytes) -> None:
        """`key`: 32 bytes. `facts`: what a block depends on beside its hash. Prefixes of engines
        that differ in it get different ids."""
        self._names = key
        blocks = hashlib.blake2b(b"blocks\0" + facts, digest_size=32, key=key).digest()
        self._blocks = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=blocks)

    def of_blocks(self, hashes: Iterable[bytes], mark: bytes = b"") -> list[int]:
        """The ids of blocks, by their hashes, which stand for all blocks before them, too. `mark`:
        what these blocks depend on beside that. All hashes are of one length."""
        keyed, number = self._blocks.copy, int.from_bytes
        shift = 8 * _DIGEST_BYTES - ID_BITS
        ids = []
        for one in hashes:
            state = keyed()  # half of the time is in the key
            state.update(one + mark)
            ids.append(number(state.digest(), "little") >> shift)
        return ids

    def of_name(self, name: str) -> str:
        """The digest of a name, as hexadecimal digits."""
        text = b"name\0" + name.encode(errors="surrogatepass")
        return hashlib.blake2b(text, digest_size=_DIGEST_BYTES, key=self._names).hexdigest()
