"""Hidden names: what they are made of, for many keys at once as for one."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import algorithms
from cryptography.hazmat.primitives.cmac import CMAC

from tiers.block import MAX_KEY_BYTES, NAMESPACE_BYTES
from tiers.wrappers import hidden_names
from tiers.wrappers.hidden_names import FEW, HiddenNames

SPACE_KEY, KEY = bytes(range(32)), bytes(range(100, 132))
NAMES = HiddenNames(SPACE_KEY, KEY)


def cmac(key: bytes) -> bytes:
    mac = CMAC(algorithms.AES(KEY))
    mac.update(key)
    return mac.finalize()


@pytest.mark.parametrize("count", [1, FEW, FEW + 1])
@pytest.mark.parametrize("size", range(NAMESPACE_BYTES + 1, MAX_KEY_BYTES + 1))
def test_a_name_is_its_namespace_and_the_cmac_of_its_key(size: int, count: int) -> None:
    chance = random.Random(size)
    keys = [chance.randbytes(size) for _ in range(count)]
    assert NAMES.of(keys) == [NAMES.space(key[:NAMESPACE_BYTES]) + cmac(key) for key in keys]


def test_keys_of_several_lengths_get_their_names_in_order() -> None:
    chance = random.Random(0)
    keys = [chance.randbytes(chance.randrange(NAMESPACE_BYTES + 1, 70)) for _ in range(300)]
    keys += keys[:7]
    assert NAMES.of(keys) == [name for key in keys for name in NAMES.of([key])]
    assert NAMES.of([]) == []


def test_names_of_one_block_of_two_ranks_have_nothing_in_common() -> None:
    block = b"the engine's hash of a prompt"
    one, other = NAMES.of([bytes([rank]) * NAMESPACE_BYTES + block for rank in range(2)])
    assert one[:NAMESPACE_BYTES] != other[:NAMESPACE_BYTES]
    assert one[NAMESPACE_BYTES:] != other[NAMESPACE_BYTES:]


def test_other_keys_make_other_names() -> None:
    key = bytes(40)
    (name,) = NAMES.of([key])
    assert HiddenNames(KEY, KEY).of([key])[0][:NAMESPACE_BYTES] != name[:NAMESPACE_BYTES]
    assert HiddenNames(KEY, SPACE_KEY).of([key])[0][NAMESPACE_BYTES:] != name[NAMESPACE_BYTES:]


def test_nothing_is_kept_for_each_number_of_keys() -> None:
    """`struct` keeps the formats of the last hundred, of 32 bytes for each name."""
    keys = [number.to_bytes(40) for number in range(4200)]
    NAMES.of(keys)
    tracemalloc.start()
    for count in range(4000, 4040):
        NAMES.of(keys[:count])
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1 << 20


def test_a_name_may_end_with_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_names, "_encrypt", lambda _, blocks: np.zeros_like(blocks))
    assert NAMES.of([bytes(40)] * (FEW + 1)) == [bytes(32)] * (FEW + 1)
