"""Codecs: every payload comes back byte for byte, and what is damaged or hostile is refused."""

from __future__ import annotations

import logging
import random
import struct
import warnings

import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tiers.codec import CODECS, EVERY, SAMPLES, Encoder, decode
from tiers.errors import RecordError

NAMES = ("none", "zstd", "byteplanes", "auto")


def bf16(elements: int = 4096) -> memoryview:
    """Normally distributed numbers, as KV is, nearly."""
    numbers = random.Random(0)
    upper = [struct.pack(">f", numbers.gauss(0, 1))[:2][::-1] for _ in range(elements)]
    return memoryview(bytearray(b"".join(upper)))


def noise(length: int) -> memoryview:
    return memoryview(bytearray(random.Random(1).randbytes(length)))


def test_what_is_read_only_is_encoded_without_a_warning() -> None:
    payload = bf16()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoded = Encoder("byteplanes").encode(payload.toreadonly())
    assert encoded == Encoder("byteplanes").encode(payload)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.binary(max_size=300))
def test_what_is_decoded_is_what_was_encoded(name: str, data: bytes) -> None:
    payload = memoryview(bytearray(data))
    codec, stored = Encoder(name).encode(payload)  # type: ignore[arg-type]
    assert len(stored) <= len(payload)
    back = memoryview(bytearray(len(data)))
    decode(codec, bytes(stored), back)
    assert back == data


def test_a_codec_is_stored_by_its_number() -> None:
    assert CODECS == {"none": 0, "zstd": 1, "byteplanes": 2}, "records of before are read by these"


def test_planes_halve_what_zstd_leaves_of_kv() -> None:
    payload = bf16()
    sizes = {name: len(Encoder(name).encode(payload)[1]) for name in ("zstd", "byteplanes")}
    assert sizes["byteplanes"] < sizes["zstd"] < len(payload)
    assert len(payload) / sizes["byteplanes"] > 1.3


def test_the_caller_keeps_its_memory_and_its_bytes() -> None:
    payload = bf16()
    before = bytes(payload)
    assert Encoder("none").encode(payload)[1] is payload
    Encoder("byteplanes").encode(payload)
    assert payload == before


def test_auto_leaves_noise_alone_and_looks_again() -> None:
    encoder, random_bytes, kv = Encoder("auto", "redis"), noise(8192), bf16()
    for _ in range(SAMPLES + 1):
        assert encoder.encode(random_bytes)[0] == CODECS["none"]
    assert 0 < encoder.ratio < 1.15
    assert encoder.encode(kv)[0] == CODECS["none"], "not looked at"
    codecs = [encoder.encode(kv)[0] for _ in range(EVERY + SAMPLES * 8)]
    assert CODECS["byteplanes"] in codecs


def test_auto_takes_planes_for_kv_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    encoder, kv = Encoder("auto", "redis"), bf16()
    assert {encoder.encode(kv)[0] for _ in range(SAMPLES * 3)} == {CODECS["byteplanes"]}
    assert [line.partition("; ")[0] for line in caplog.messages] == [
        "tier 'redis': codec auto takes byteplanes"
    ]


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"\x00" * 8192,
        zstandard.compress(b"\x00" * (1 << 20)) + b"\x00" * 4096,
        zstandard.compress(b"\x00" * 4096),
    ],
    ids=["nothing", "no frame", "a bomb", "one plane"],
)
@pytest.mark.parametrize("codec", ["zstd", "byteplanes"])
def test_what_does_not_decode_is_refused(codec: str, stored: bytes) -> None:
    payload = memoryview(bytearray(8192))
    with pytest.raises(RecordError):
        decode(CODECS[codec], stored, payload)


def test_unknown_codecs_are_refused() -> None:
    with pytest.raises(RecordError, match="unknown codec 9"):
        decode(9, b"", memoryview(bytearray(1)))


def test_real_bfloat16_comes_back() -> None:
    numbers = torch.randn(100_000, dtype=torch.bfloat16)
    payload = memoryview(bytearray(numbers.view(torch.uint8).numpy().tobytes()))
    codec, stored = Encoder("byteplanes").encode(payload)
    back = bytearray(len(payload))
    decode(codec, stored, memoryview(back))
    assert codec == CODECS["byteplanes"]
    assert torch.equal(torch.frombuffer(back, dtype=torch.bfloat16), numbers)
