"""The record: whatever bytes a tier hands us, only what was packed is believed."""

from __future__ import annotations

import os
import struct
import threading
import time

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tiers.block import (
    HEADER_BYTES,
    HELD_BYTES,
    MAX_KEY_BYTES,
    NAMESPACE_BYTES,
    copy,
    expect,
    namespace,
    pack_header,
    parse_header,
    verify,
)
from tiers.codec import CODECS, decode
from tiers.errors import OtherFormat, RecordError

KEYS = st.binary(min_size=NAMESPACE_BYTES + 1, max_size=MAX_KEY_BYTES)
PAYLOADS = st.binary(max_size=300)


@given(KEYS, PAYLOADS, st.sampled_from(sorted(CODECS.values())))
def test_a_record_says_what_it_was_packed_with(key: bytes, payload: bytes, codec: int) -> None:
    header = parse_header(pack_header(key, len(payload), payload, codec))
    assert (header.key, header.codec, header.payload_bytes) == (key, codec, len(payload))
    verify(header, payload)


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_any_bytes_are_no_record(data: bytes) -> None:
    with pytest.raises(RecordError):
        parse_header(data)


@given(KEYS, PAYLOADS, st.integers(0, 8 * HEADER_BYTES - 1))
def test_a_flipped_bit_in_a_header(key: bytes, payload: bytes, bit: int) -> None:
    header = bytearray(pack_header(key, len(payload), payload))
    header[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RecordError):
        parse_header(header)


@given(KEYS, st.binary(min_size=1, max_size=300), st.data())
def test_a_changed_payload(key: bytes, payload: bytes, data: st.DataObject) -> None:
    header = parse_header(pack_header(key, len(payload), payload))
    other = data.draw(st.binary(max_size=400).filter(lambda b: b != payload))
    with pytest.raises(RecordError):
        verify(header, other)
    with pytest.raises(RecordError, match="stored bytes"):
        verify(header, payload[1:], header.checksum)


@given(KEYS, KEYS, PAYLOADS, st.integers(0, 400))
def test_another_key_s_record_or_one_of_another_length(
    key: bytes, other: bytes, payload: bytes, length: int
) -> None:
    header = pack_header(key, len(payload), payload)
    if (key, len(payload)) == (other, length):
        assert expect(header, other, length).key == key
    else:
        with pytest.raises(RecordError):
            expect(header, other, length)


FIELDS = struct.Struct("<8sHBBHHQQ16s16s128s")


@given(
    st.integers(0, 255),
    st.one_of(st.integers(0, 200), st.integers(0, 2**16 - 1)),
    st.integers(0, 2**64 - 1),
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=128, max_size=128),
)
def test_whoever_writes_the_seal_too_gets_no_more_than_a_miss(
    codec: int, key_length: int, payload_bytes: int, digests: bytes, rest: bytes
) -> None:
    fields = FIELDS.pack(
        *(b"kvtiers\n", 1, codec, 1, key_length, 0, payload_bytes, payload_bytes),
        *(digests[:16], digests[16:], rest),
    )
    checksum = struct.pack("<Q", xxhash.xxh3_64_intdigest(fields))
    header = parse_header((fields + checksum).ljust(HEADER_BYTES, b"\0"))
    assert len(header.key) <= NAMESPACE_BYTES + 128
    with pytest.raises(RecordError):
        expect((fields + checksum).ljust(HEADER_BYTES, b"\0"), b"k" * 40, 4096)
    with pytest.raises(RecordError):
        verify(header, b"anything")


def test_a_record_of_another_version_is_told_from_none() -> None:
    whole = pack_header(b"k" * 40, 4, b"data")

    def written(place: int) -> bytes:
        fields = bytearray(whole[: FIELDS.size])
        fields[place] += 1
        checksum = struct.pack("<Q", xxhash.xxh3_64_intdigest(fields))
        return bytes(fields + checksum).ljust(HEADER_BYTES, b"\0")

    for version in (8, 11):  # or another checksum than this one knows
        with pytest.raises(OtherFormat):
            parse_header(written(version))
    with pytest.raises(RecordError, match="not a record") as none:
        parse_header(written(0))
    assert not isinstance(none.value, OtherFormat)


@given(st.integers(0, 99), st.binary(max_size=300), st.integers(0, 300))
def test_no_stored_bytes_break_a_decoder(codec: int, stored: bytes, length: int) -> None:
    payload = memoryview(bytearray(length))
    try:
        decode(codec, stored, payload)
    except RecordError:
        return
    assert codec in CODECS.values()


@given(
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=4),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=4),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_engines_share_a_namespace_only_if_they_agree_on_everything(
    one: dict[str, str], two: dict[str, str], rank: int, other: int
) -> None:
    same = namespace(one, rank, 4) == namespace(two, other, 4)
    assert same == ((one, rank) == (two, other))
    assert namespace(one, rank, 4) != namespace(one, rank, 8)


@pytest.mark.parametrize("length", [0, 5, HELD_BYTES, HELD_BYTES + 1])
def test_bytes_are_copied_where_they_fit(length: int) -> None:
    source, around = os.urandom(length), bytearray(length + 2)
    target = memoryview(around)[1:-1]
    copy(target, source)
    assert around == b"\0" + source + b"\0"
    with pytest.raises(ValueError):
        copy(target, source + b"x")
    with pytest.raises(TypeError):
        copy(target.toreadonly(), source)
    assert around == b"\0" + source + b"\0"


def test_others_run_while_many_bytes_are_copied() -> None:
    source, target = bytes(64 << 20), memoryview(bytearray(64 << 20))
    ran: list[float] = []
    is_over = False

    def engine() -> None:
        while not is_over:
            ran.append(time.perf_counter())

    thread = threading.Thread(target=engine)
    thread.start()
    try:
        for _ in range(100):
            began = time.perf_counter()
            copy(target, source)
            took = time.perf_counter() - began
            if any(began + took / 4 < moment < began + took * 3 / 4 for moment in ran):
                return
            ran.clear()
        raise AssertionError("the interpreter's lock was held")
    finally:
        is_over = True
        thread.join()
