"""From a file to a chain: what YAML can hold in store for us, and what must never show."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from spec.document import read_yaml
from spec.errors import SpecError
from spec.load import MAX_BYTES, load_chain, load_document

SECRET = "s3same"
GOOD = """\
version: 1
tiers:                 # load priority: first is tried first
  - {type: cpu,   capacity: 8GiB}
  - {type: disk,  capacity: 200GiB, path: /var/lib/kvtiers}
  - {type: redis, url: "redis://cache.internal:6379/0", ttl: 1d}
"""


def problems(tmp_path: Path, text: str | bytes) -> list[str]:
    """The lines for a file with this content, without the folder it is in."""
    path = tmp_path / "chain.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(SpecError) as caught:
        load_chain(path)
    assert str(caught.value).splitlines() == list(caught.value.problems)
    return [line.replace(f"{tmp_path}/", "") for line in caught.value.problems]


@pytest.mark.parametrize("kind", [str, Path])
def test_a_chain_comes_from_a_path_or_from_what_its_file_holds(tmp_path: Path, kind: type) -> None:
    path = tmp_path / "chain.yaml"
    path.write_text(GOOD)
    made = load_chain(kind(path))
    assert [tier.tier_name for tier in made.tiers] == ["cpu", "disk", "redis"]
    tiers = [
        {"type": "cpu", "capacity": "8GiB"},
        {"type": "disk", "capacity": "200GiB", "path": "/var/lib/kvtiers"},
        {"type": "redis", "url": "redis://cache.internal:6379/0", "ttl": "1d"},
    ]
    assert load_chain({"version": 1, "tiers": tiers}) == made


def test_what_is_neither_is_refused() -> None:
    with pytest.raises(SpecError, match=r"^chain: found a list; write a file's path$"):
        load_chain([])  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"^chain: tiers\[0\].capacity: found '1 GB!'; use one of"):
        load_chain({"version": 1, "tiers": [{"type": "cpu", "capacity": "1 GB!"}]})
    with pytest.raises(SpecError, match="no readable file"):
        load_chain("chain\0.yaml")


@pytest.mark.parametrize("text", ["﻿" + GOOD, GOOD.replace("\n", "\r\n"), "---\n" + GOOD + "...\n"])
def test_how_editors_save_does_not_matter(tmp_path: Path, text: str) -> None:
    path = tmp_path / "chain.yaml"
    path.write_bytes(text.encode())
    assert len(load_chain(path).tiers) == 3


def test_anchors_stand_for_what_they_name(tmp_path: Path) -> None:
    path = tmp_path / "chain.yaml"
    path.write_text(
        "version: 1\ntiers:\n"
        "  - {type: cpu, capacity: &size 1GiB}\n"
        "  - {type: disk, capacity: *size, path: /a}\n"
    )
    assert [tier.capacity for tier in load_chain(path).tiers] == [1 << 30] * 2  # type: ignore[attr-defined]


def bomb(form: str) -> str:
    """Nine levels, each ten times the one below."""
    levels = [form.format(this="a", inner="{x: y}")]
    levels += [
        form.format(this=this, inner=", ".join([f"*{below}"] * 10))
        for below, this in zip("abcdefgh", "bcdefghi", strict=True)
    ]
    return "\n".join(levels)


@pytest.mark.parametrize("form", ["{this}: &{this} [{inner}]", "{this}: &{this} {{<<: [{inner}]}}"])
@pytest.mark.timeout(20)
def test_anchor_bombs_are_harmless(tmp_path: Path, form: str) -> None:
    lines = problems(tmp_path, f"version: 1\n{bomb(form)}\nload_policy: *i\nsalt: *i\ntiers: *i\n")
    assert lines[0].startswith("chain.yaml:2: a: found an unknown key; use one of version, tiers,")
    assert any(": tiers" in line for line in lines)
    assert max(map(len, lines)) < 300


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("version: 1\ntiers: &a\n  - *a\n", "chain.yaml:2: tiers[0]: found a list"),
        ("version: 1\ntiers: [&a {type: *a}]\n", "chain.yaml:2: tiers[0].type: found a mapping"),
        ("[" * 5000, "chain.yaml:1: found too many brackets in each other"),
        ("version: 1\ntiers: " + "9" * 5000, "chain.yaml:2: found invalid YAML (invalid value)"),
        ("version: 1\nsalt: \x00\n", "chain.yaml:2: found the character U+0000; remove it"),
        (b"version: 1\n# caf\xe9\n", "chain.yaml:2: found the byte 0xe9, which is not UTF-8"),
        (GOOD.encode("utf-16"), "chain.yaml:1: found the byte 0xff, which is not UTF-8"),
        (b"#" * (MAX_BYTES + 1), "chain.yaml: found more than 1 MiB"),
        ("version: !!python/object/apply:os.abort []", "chain.yaml:1: found invalid YAML"),
        ("version: !!timestamp x", "chain.yaml:1: found invalid YAML"),
        (f"version: 1\ntiers: {'x' * 81}\n", "chain.yaml:2: tiers: found a text of 81 characters"),
        ("version: !!bool x", "chain.yaml:1: found invalid YAML (invalid value)"),
        ("? {a: b}\n: c\n", "chain.yaml:1: found invalid YAML (unhashable key)"),
    ],
)
def test_hostile_files_get_one_line(tmp_path: Path, text: str | bytes, says: str) -> None:
    (line,) = problems(tmp_path, text)
    assert line.startswith(says)


def test_a_device_without_end_is_read_no_further_than_a_chain_is_long() -> None:
    with pytest.raises(SpecError, match=r"^/dev/zero: found more than 1 MiB; "):
        load_chain("/dev/zero")
    with pytest.raises(SpecError, match=r"^/proc/self/mem: found no readable file \(.*error\); "):
        load_chain("/proc/self/mem")


def test_a_date_and_a_merge_key_are_plain_text() -> None:
    document = read_yaml("a: 2024-01-01\n<<: {b: 1}\nc: 0x10\nd: on\ne: null\n")
    assert document.data == {"a": "2024-01-01", "<<": {"b": 1}, "c": 16, "d": True, "e": None}


def test_all_problems_are_told_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = """\
version: 1
load_policy: frist
tiers:
  - type: cpu
    capcity: 8GiB
  - type: disk
    name: x
    path: /a
    capacity: 200GB/s
  - type: redis
    name: x
    url: redis://cache:port
promote: perhaps
"""
    told = problems(tmp_path, text)
    assert [line.split(": found")[0] for line in told] == [
        "chain.yaml:2: load_policy",
        "chain.yaml:5: tiers[0].capcity",
        "chain.yaml:9: tiers[1].capacity",
        "chain.yaml:11: tiers[2].name",
        "chain.yaml:12: tiers[2].url",
        "chain.yaml:13: promote",
    ]


def test_problems_beyond_counting_are_counted(tmp_path: Path) -> None:
    keys = "".join(f"key{number}: x\n" for number in range(5000))
    for text, more in ((f"{GOOD}{keys}", 4950), ("version: 1\n" * 5000, 4949)):
        told = problems(tmp_path, text)
        assert len(told) == 51
        assert told[-1] == f"chain.yaml: found {more} more problems; correct these first"


@pytest.mark.parametrize(
    "tier",
    [
        "{type: redis, url: 'redis://:s3same@cache:port'}",
        "{type: redis, url: 'redis:/:s3same@cache'}",
        "{type: redis, url: 'redis://:s3same cache'}",
        "{type: redis, url: [s3same]}",
        "{type: redis, url: redis://a, password: s3same}",
        "{type: redis, url: *s3same}",
        "{type: redis, url: !s3same x}",
        "{type: redis, url: !s3same!x y}",
        "{type: redis, url: redis://a, key_prefix: ':s3same@ b'}",
        "{type: 'redis://:s3same@cache'}",
        "{'redis://:s3same@cache': x, type: redis}",
        "{'redis://:s3same@cache': x, 'redis://:s3same@cache': y}",
        "redis://:s3same@cache",
        "{type: redis, url: redis://:s3same: x@cache}",
        "{type: redis, ttl: 'redis://:s3same@cache', url: redis://a}",
        "{type: object, url: 'az://kv?sv=1&sig=s3same'}",
        "{type: object, url: az://kv, endpoint: 'https://x/?X-Amz-Credential=s3same'}",
        "{type: object, url: az://kv, options: {endpoint: 'https://x/?sig=s3same'}}",
        "{type: disk, path: /kv, capacity: 1GiB, encryption: {key_file: s3same}}",
    ],
)
def test_no_line_shows_a_secret(tmp_path: Path, tier: str) -> None:
    path = tmp_path / "chain.yaml"
    path.write_text(f"version: 1\nsalt: [{SECRET}]\ntiers:\n  - {tier}\n")
    with pytest.raises(SpecError) as caught:
        load_chain(path)
    assert SECRET not in str(caught.value) and SECRET not in repr(caught.value)
    assert caught.value.__suppress_context__


PIECES = st.sampled_from(
    [
        *("version: 1", "tiers:", "\n", " ", "  - ", "type: ", "cpu", "disk", "{", "}", "[", "]"),
        *("capacity: ", "8GiB", "path: ", "/a", "name: ", ": ", ", ", "- ", "&a ", "*a", "!", "|"),
        *(">", "'", '"', "#", "null", "\t", "? ", "<<: ", "1", "-1", ".inf", "~", "%", "---"),
        *("\x1b", "é"),
    ]
)


@settings(deadline=None, max_examples=150)
@given(st.one_of(st.text(), st.lists(PIECES, max_size=40).map("".join)))
@example("a: &a [*a]\ntiers: *a")
def test_any_text_is_a_chain_or_lines_about_it(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        load_chain(path)
    except SpecError as error:
        for line in error.problems:
            assert line.startswith(str(path)) and "found" in line and line.isprintable()


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
TIERS = st.fixed_dictionaries(
    {"type": st.sampled_from(["cpu", "disk", "redis"]) | VALUES},
    optional={
        **dict.fromkeys(("name", "capacity", "path", "url", "ttl", "timeout", "codec"), VALUES),
        "x": VALUES,
    },
)


@settings(deadline=None, max_examples=150)
@given(
    st.dictionaries(st.sampled_from(["version", "load_policy", "salt", "staging", "y"]), VALUES),
    st.lists(TIERS, max_size=3) | VALUES,
)
def test_any_mapping_is_a_chain_or_lines_about_it(
    document: dict[str, object], tiers: object
) -> None:
    try:
        load_chain({"version": 1, **document, "tiers": tiers})
    except SpecError as error:
        for line in error.problems:
            assert line.startswith("chain: ") and "; " in line and line.isprintable()


class Shelf(BaseModel):
    """A document that is no chain."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    width: int = Field(gt=0, description="How wide it is. In millimetres.", examples=[600])
    books: tuple[str, ...] = Field(min_length=1)


def test_other_documents_get_the_same_lines(tmp_path: Path) -> None:
    path = tmp_path / "shelf.yaml"
    path.write_text("widht: 3\nbooks: []\nversion: 2\n")
    with pytest.raises(SpecError) as caught:
        load_document(path, Shelf, "write width:")
    assert [line.replace(f"{tmp_path}/", "") for line in caught.value.problems] == [
        "shelf.yaml:1: widht: found an unknown key; did you mean width?",
        "shelf.yaml:2: books: found an empty list; tuple should have at least 1 item after "
        "validation, not 0",
        "shelf.yaml:3: version: found an unknown key; use one of width, books",
    ]
    path.write_text("")
    with pytest.raises(SpecError, match=r"shelf\.yaml:1: found nothing; write width:$"):
        load_document(path, Shelf, "write width:")
    path.write_text('{"width": 2, "books": ["one"]}')
    assert load_document(path, Shelf, "write width:") == Shelf(width=2, books=("one",))
