"""Sizes and durations as an operator writes them, and what is shown of a secret."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec.fields import (
    exact_size,
    format_duration,
    format_number,
    format_rate,
    format_size,
    mask_secrets,
    parse_duration,
    parse_rate,
    parse_size,
)


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("8GiB", 8 << 30),
        ("500MB", 500_000_000),
        ("1.5 kB", 1500),
        (" 64KiB ", 65536),
        ("7", 7),
        (4096, 4096),
        ("0.1GiB", 107374182),
        ("9007199254740993B", 9007199254740993),
    ],
)
def test_sizes(written: object, size: int) -> None:
    assert parse_size(written) == size


@pytest.mark.parametrize(
    "written",
    [
        *("", "GiB", "8 gib", "8G", "200GB/s", "1e9", "-1GiB", "0", "0.5B", "0x10", "9" * 400),
        *(0, -1, 0.2, True, None, [], float("inf"), float("nan"), 1 << 63, 10**400),
    ],
)
def test_what_is_no_size(written: object) -> None:
    with pytest.raises(ValueError, match=r"GiB|byte"):
        parse_size(written)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("250ms", 0.25), ("1.5s", 1.5), ("10m", 600.0), ("2h", 7200.0), ("1d", 86400.0)],
)
def test_durations(written: str, seconds: float) -> None:
    assert parse_duration(written) == seconds
    assert format_duration(seconds) == written


@pytest.mark.parametrize(
    ("written", "rate", "shown"),
    [
        ("200MB/s", 2e8, "200MB/s"),
        ("6 GB / m", 1e8, "100MB/s"),
        ("86400MB/day", 1e6, "1MB/s"),
        ("24MB/d", 24e6 / 86400, "24MB/day"),
        ("1MB/h", 1e6 / 3600, "24MB/day"),
    ],
)
def test_rates(written: str, rate: float, shown: str) -> None:
    assert parse_rate(written) == rate
    assert format_rate(rate) == shown


@pytest.mark.parametrize(
    "written", ["200MB", "200/s", "8/day", "8KiB/ms", "0MB/s", "-1GB/s", 5, None]
)
def test_what_is_no_rate(written: object) -> None:
    with pytest.raises(ValueError, match=r"s, m, h or day|unit|zero"):
        parse_rate(written)


@pytest.mark.parametrize(
    "written", ["5", 5, 1.5, "0s", "-1s", "5 days", "1e3s", "40000d", "1us", None]
)
def test_what_is_no_duration(written: object) -> None:
    with pytest.raises(ValueError, match=r"ms|30s"):
        parse_duration(written)


@given(st.integers(1, (1 << 63) - 1))
def test_a_size_written_exactly_reads_back(size: int) -> None:
    assert parse_size(exact_size(size)) == size
    assert len(format_size(size)) <= len("1023.9GiB")


@given(st.floats(0.001, 36500 * 86400))
def test_a_duration_reads_back(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


def test_sizes_are_written_in_the_unit_they_were_meant_in() -> None:
    sizes = ("8GiB", "200GB", "1500B", "1kB", "512MiB", "1B", "1.5GiB", "734.9MB")
    assert [exact_size(parse_size(size)) for size in sizes] == list(sizes)


@pytest.mark.parametrize(
    ("number", "digits", "written"),
    [(152.4, 2, "150"), (999.6, 3, "1000"), (1234.0, 3, "1230"), (0.0524, 2, "0.052"), (0, 3, "0")],
)
def test_numbers_for_people_have_no_exponent(number: float, digits: int, written: str) -> None:
    assert format_number(number, digits) == written


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("redis://:s3same@cache", "redis://:***@cache"),
        ("redis://me:s3same@cache", "redis://me:***@cache"),
        ("redis:/:s3same@cache", "redis:***@cache"),
        ("me:s3same@cache", "me:***@cache"),
        ("redis://:s3samecache:6379", "redis://:***"),
        ("redis://cache?password=s3same", "redis://cache?password=***"),
        ("//:s3same@cache", "***@cache"),
        ("redis://cache:6379/0", "redis://cache:6379/0"),
        ("redis://[::1]:7000/1", "redis://[::1]:7000/1"),
        ("/mnt/pool@2/kv", "/mnt/pool@2/kv"),
        ("8GiB", "8GiB"),
    ],
)
def test_secrets_are_masked_and_the_rest_is_not(written: str, shown: str) -> None:
    assert mask_secrets(written) == shown
