"""Who can read or plant blocks? Nobody without the keys: what a store is given is encrypted.

A block is encrypted with AES-256-GCM under a nonce of 96 random bits. Its key, which begins with
the namespace, and its length are associated data: only the block that was stored under that key, by
someone with the encryption key, decrypts. A block's key is a digest of the prompt, which a reader
could guess, so a store sees AES-CMACs of keys as names, behind their encrypted namespace.

NIST SP 800-38D allows 2^32 encryptions under one key with random nonces, over all engines: 8 PiB of
blocks of 2 MiB, 256 TiB of blocks of 64 KiB.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.cmac import CMAC

from tiers.errors import TierError
from tiers.host.slots import slot_stride
from tiers.store import (
    Block,
    Capability,
    Clear,
    GatheredBlock,
    LocalIndex,
    Packs,
    PacksWindows,
    Prefix,
    Recent,
    TierStore,
    Touch,
    each,
    required,
)
from tiers.wrappers.integrity import StagedStore

AES_BYTES = 16
"""A block of AES; also the length of a namespace (`NAMESPACE_BYTES`)."""

SCALAR_MAX_KEYS = 12
"""Keys whose names are made one by one: numpy's calls take some 30 us for however few."""

Words = npt.NDArray[np.uint64]


class HiddenNames:
    """Names that show a store nothing of the keys they stand for, made for many keys at once by two
    keys of AES, of 32 bytes each. Thread-safe.

    A name is its key's namespace, encrypted as one block of AES, and the AES-CMAC of the whole key
    (RFC 4493, NIST SP 800-38B). Both are pseudorandom to whoever has no key of AES: equal only for
    equal namespaces and equal keys, and neither leads back to its source. CMAC chains the blocks of
    AES of one key, but not those of two. So the first blocks of many keys are encrypted in one
    call, then the second ones: 0.3 us a key. For a few the library's own CMAC is faster.
    """

    def __init__(self, space_key: bytes, key: bytes) -> None:
        self._spaces = Cipher(algorithms.AES(space_key), modes.ECB())
        self._chain = Cipher(algorithms.AES(key), modes.ECB())
        self._mac = CMAC(algorithms.AES(key))
        zero = self._chain.encryptor().update(bytes(AES_BYTES))
        self._if_whole = _doubled(zero)
        self._if_padded = _doubled(self._if_whole)

    def space(self, namespace: bytes) -> bytes:
        """The beginning of all names of a namespace; an engine has a namespace for each rank."""
        return self._spaces.encryptor().update(namespace)

    def of(self, keys: Sequence[bytes]) -> list[bytes]:
        """The names, of 32 bytes, of keys, which are longer than a namespace."""
        if len(keys) <= SCALAR_MAX_KEYS:
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


NONCE_BYTES = 12
TAG_BYTES = 16


def encrypted_bytes(payload_bytes: int) -> int:
    """Return the bytes of an encrypted payload, in whole pages, which direct I/O needs."""
    return slot_stride(NONCE_BYTES + payload_bytes + TAG_BYTES)


class BlockCipher:
    """Encrypts blocks and names by one encryption key of 32 bytes."""

    def __init__(self, key: bytes) -> None:
        self.names = HiddenNames(_derive(key, b"kvtiers spaces"), _derive(key, b"kvtiers cmac"))
        self._aead = AESGCM(_derive(key, b"kvtiers blocks"))

    def encrypt(self, block: Block, out: memoryview) -> None:
        """Fill `out`, of `encrypted_bytes`, with the encrypted payload."""
        end = NONCE_BYTES + len(block.payload) + TAG_BYTES
        out[:NONCE_BYTES] = nonce = secrets.token_bytes(NONCE_BYTES)
        self._aead.encrypt_into(nonce, block.payload, _associated_data(block), out[NONCE_BYTES:end])
        out[end:] = bytes(len(out) - end)

    def decrypt(self, block: Block, data: memoryview) -> bool:
        """Decrypt `data` into the block's payload; False if it was not encrypted for this block."""
        end = NONCE_BYTES + len(block.payload) + TAG_BYTES
        nonce, body = bytes(data[:NONCE_BYTES]), data[NONCE_BYTES:end]
        try:
            self._aead.decrypt_into(nonce, body, _associated_data(block), block.payload)
        except InvalidTag:
            return False
        return True


def key_mark(key: bytes) -> str:
    """What stands for an encryption key where nobody may learn it."""
    return _derive(key, b"kvtiers key mark")[:8].hex()


def _derive(key: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(key=key, person=purpose.ljust(16), digest_size=32).digest()


def _associated_data(block: Block) -> bytes:
    return len(block.payload).to_bytes(8, "little") + block.key


def _named(
    cipher: BlockCipher, blocks: Sequence[Block], forms: Sequence[memoryview]
) -> list[Block]:
    """Blocks as the store is given them: by the cipher's names, also of those in their prefix."""
    keys = cipher.names.of([block.key for block in blocks])
    prefixes: dict[int, Sequence[bytes]] = {}
    named: list[Block] = []
    for block, key, form in zip(blocks, keys, forms, strict=True):
        if (prefix := block.prefix) is None:
            named.append(Block(key, form))
            continue
        if (names := prefixes.get(id(prefix.keys))) is None:
            names = prefixes[id(prefix.keys)] = cipher.names.of(prefix.keys)
        named.append(GatheredBlock(key, form, None, Prefix(names, prefix.at, prefix.group)))
    return named


class EncryptedStore(StagedStore):
    """A TierStore over another that is opened for payloads of `encrypted_bytes`.

    The first of `keys`, of 32 bytes each, encrypts. A block that is not found under the name of its
    cipher is looked for, as it is dropped and touched, under those of the others. Blocks that do
    not decrypt count as damaged.
    """

    def __init__(self, store: TierStore, keys: Sequence[bytes], payload_bytes: int) -> None:
        super().__init__(store, encrypted_bytes(payload_bytes))
        self.key_mark = key_mark(keys[0])  # under which it puts blocks
        self._ciphers = [BlockCipher(key) for key in keys]

    def capability(self, kind: type[Capability]) -> Capability | None:
        """As the store, but for Recent: the names that the store has lead back to no key."""
        return None if kind is Recent else super().capability(kind)

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return self._under_any("has", self._inner.has, keys)

    def peek(self, keys: Sequence[bytes]) -> list[bool]:
        return self._under_any("peek", required(self._inner, LocalIndex).peek, keys)

    def _under_any(
        self, verb: str, ask: Callable[[Sequence[bytes]], list[bool]], keys: Sequence[bytes]
    ) -> list[bool]:
        held = each(verb, ask(self._ciphers[0].names.of(keys)), len(keys))
        for cipher in self._ciphers[1:]:
            places = [place for place, found in enumerate(held) if not found]
            if places:
                answers = ask(cipher.names.of([keys[place] for place in places]))
                for place, answer in zip(places, each(verb, answers, len(places)), strict=True):
                    held[place] = answer
        return held

    def pack_blocks(self) -> int:
        return required(self._inner, Packs).pack_blocks()

    def held_prefix(self, prompts: Sequence[Sequence[bytes]]) -> list[int]:
        """As the store, under the names of the cipher that finds most: of all blocks, or of those
        behind what is held under older ones, where keys have rotated within a prompt."""
        ask = required(self._inner, Packs).held_prefix
        names = [*map(self._ciphers[-1].names.of, prompts)]
        found = [*zip(ask(names), names, strict=True)]
        for cipher in reversed(self._ciphers[:-1]):
            names = [*map(cipher.names.of, prompts)]
            names += [old[:n] + new[n:] for (n, old), new in zip(found, names, strict=True)]
            counts = [*zip(ask(names), names, strict=True)]
            found = [*map(max, counts[: len(prompts)], counts[len(prompts) :])]
        return [count for count, _ in found]

    def held_blocks(self, prompts: Sequence[Sequence[bytes]]) -> list[list[bool]]:
        """As the store, under the name of any cipher."""
        ask = required(self._inner, PacksWindows).held_blocks
        found = [ask([*map(cipher.names.of, prompts)]) for cipher in self._ciphers]
        return [[*map(any, zip(*held, strict=True))] for held in zip(*found, strict=True)]

    def _pack(self, blocks: Sequence[Block], forms: Sequence[memoryview]) -> list[Block]:
        cipher = self._ciphers[0]
        for block, form in zip(blocks, forms, strict=True):
            cipher.encrypt(block, form)
            if block.has_changed():
                form[:NONCE_BYTES] = bytes(NONCE_BYTES)  # it must not decrypt
        return _named(cipher, blocks, forms)

    def _load(self, blocks: Sequence[Block], forms: Sequence[memoryview]) -> list[bool]:
        found = [False] * len(blocks)
        for cipher in self._ciphers:
            places = [place for place, done in enumerate(found) if not done]
            try:
                opened = self._open(cipher, blocks, forms, places) if places else ()
            except TierError:  # what came under another key has come
                if not any(found):
                    raise
                break
            for place in opened:
                found[place] = True
        return found

    def _open(
        self,
        cipher: BlockCipher,
        blocks: Sequence[Block],
        forms: Sequence[memoryview],
        places: Sequence[int],
    ) -> set[int]:
        asked = _named(cipher, [blocks[place] for place in places], [forms[p] for p in places])
        got = each("get", self._inner.get(asked), len(asked))
        there = [(p, a.key) for p, a, ok in zip(places, asked, got, strict=True) if ok]
        opened = {p for p, _ in there if cipher.decrypt(blocks[p], forms[p])}
        self._drop_damaged([name for place, name in there if place not in opened])
        return opened

    def _names(self, keys: Sequence[bytes]) -> list[bytes]:
        of_each = [cipher.names.of(keys) for cipher in self._ciphers]
        return [name for names in zip(*of_each, strict=True) for name in names]

    def drop(self, keys: Sequence[bytes]) -> None:
        self._inner.drop(self._names(keys))

    def touch(self, keys: Sequence[bytes]) -> None:
        required(self._inner, Touch).touch(self._names(keys))

    def clear(self, namespace: bytes) -> bool:
        """Clear what each cipher makes of the namespace, one after the other."""
        clear = required(self._inner, Clear).clear
        return any(clear(cipher.names.space(namespace)) for cipher in self._ciphers)
