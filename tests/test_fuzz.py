"""No bytes from a disk, a server or an operator do more than fail to be what they should be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.fuzz_targets import TARGETS


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=2000))
@example(b"*3\r\n$3\r\nabc\r\n:-1\r\n*1\r\n$-1\r\n-ERR no\r\n")
@example(b'{"timestamp": 1, "input_length": 16, "output_length": 0, "hash_ids": [1]}\n')
@example(b'{"block_size": 64, "requests": [{"t": 0, "in": 64, "out": 1, "hash_ids": [1]}]}')
@example(b"version: 1\ntiers:\n  - {type: cpu, capacity: 8GiB}\n")
def test_any_bytes(target: Callable[[bytes], None], data: bytes) -> None:
    target(data)
