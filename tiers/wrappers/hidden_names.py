"""Names that tell a store nothing of the keys they stand for, made for many keys at once.

A name is its key's namespace, encrypted as one block of AES, and the AES-CMAC of the whole key
(RFC 4493, NIST SP 800-38B). Both are pseudorandom to who has not the keys of AES: equal only for
equal namespaces and equal keys, and neither leads back to what it was made of. CMAC chains the
blocks of AES of one key, but not those of two. So the first blocks of many keys are encrypted in
one call, then the second ones: 0.3 us a key. For a few the library's own CMAC is faster.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.cmac import CMAC

AES_BYTES = 16
"""A block of AES; also the length of a namespace (`NAMESPACE_BYTES`)."""

FEW = 12
"""Keys whose names are made one by one: numpy's calls take some 30 us for however few."""

Words = npt.NDArray[np.uint64]


class HiddenNames:
    """Makes names by two keys of AES, of 32 bytes each. Thread-safe."""

    def __init__(self, space_key: bytes, key: bytes) -> None:
        self._spaces = Cipher(algorithms.AES(space_key), modes.ECB())
        self._chain = Cipher(algorithms.AES(key), modes.ECB())
        self._mac = CMAC(algorithms.AES(key))
        zero = self._chain.encryptor().update(bytes(AES_BYTES))
        self._if_whole = _doubled(zero)
        self._if_padded = _doubled(self._if_whole)

    def space(self, namespace: bytes) -> bytes:
        """What all names of a namespace begin with; an engine has one for each rank."""
        return self._spaces.encryptor().update(namespace)

    def of(self, keys: Sequence[bytes]) -> list[bytes]:
        """The names, of 32 bytes, of keys, which are longer than a namespace."""
        if len(keys) <= FEW:
            spaces = self._spaces.encryptor()
            return [spaces.update(key[:AES_BYTES]) + self._mac_of(key) for key in keys]
        sizes = set(map(len, keys))
        if len(sizes) < 2:
            return self._of_equal_size(keys, *sizes)
        found: dict[bytes, bytes] = {}
        for size in sizes:
            some = [key for key in keys if len(key) == size]
            found.update(zip(some, self._of_equal_size(some, size), strict=True))
        return [found[key] for key in keys]

    def _mac_of(self, key: bytes) -> bytes:
        mac = self._mac.copy()
        mac.update(key)
        return mac.finalize()

    def _of_equal_size(self, keys: Sequence[bytes], size: int) -> list[bytes]:
        padding = b"\x80".ljust(-size % AES_BYTES, b"\0") if size % AES_BYTES else b""
        last = np.frombuffer(self._if_padded if padding else self._if_whole, np.uint64)
        data = np.frombuffer(padding.join(keys) + padding, np.uint64)
        steps = data.reshape(len(keys), -1, 2).swapaxes(0, 1)
        encryptor = self._chain.encryptor()
        state = _encrypt(encryptor, steps[0])
        for step in steps[1:-1]:
            state = _encrypt(encryptor, state ^ step)
        state = _encrypt(encryptor, state ^ steps[-1] ^ last)
        spaces = _encrypt(self._spaces.encryptor(), steps[0])
        # As void, since S would cut zeros at the end. `struct` would keep a format of 2 MB for each
        # number of keys that it met of late.
        whole = np.hstack((spaces, state)).view(f"V{2 * AES_BYTES}")
        names: list[bytes] = whole.ravel().tolist()
        return names


def _encrypt(encryptor: CipherContext, blocks: Words) -> Words:
    """Encrypt blocks of AES, of two words each, every one by itself."""
    whole = np.ascontiguousarray(blocks)
    return np.frombuffer(encryptor.update(whole.data.cast("B")), np.uint64).reshape(-1, 2)


def _doubled(block: bytes) -> bytes:
    """Double an element of the field of 2^128, as RFC 4493 makes its subkeys."""
    doubled = int.from_bytes(block) << 1
    return (doubled ^ (doubled >> 128) * (1 << 128 | 0x87)).to_bytes(AES_BYTES)
