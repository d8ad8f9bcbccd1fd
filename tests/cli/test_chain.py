"""`kvtiers validate` on broken files: exit 2, and one line that says where, what, and what now."""

# ruff: noqa: E501 - the table below reads by its rows

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest


class Broken(NamedTuple):
    """A file, and what must be said of it. `key` is "" where there is none."""

    name: str
    text: str | bytes
    line: int
    key: str
    found: str
    remedy: str


CPU = "  - {type: cpu, capacity: 8GiB}\n"
HEAD = "version: 1\ntiers:\n"


def tier(text: str) -> str:
    """A chain whose second tier, on line 4, is this."""
    return f"{HEAD}{CPU}  - {text}\n"


BROKEN = [
    Broken("unknown key", tier("{type: disk, capcity: 1GiB, path: /a}"), 4, "tiers[1].capcity", "an unknown key", "did you mean capacity?"),
    Broken("unlike any key", tier("{type: cpu, capacity: 1GiB, colour: red}"), 4, "tiers[1].colour", "an unknown key", "use one of type, name, store_threshold, admission, paused, capacity"),
    Broken("unknown key at the top", f"{HEAD}{CPU}promot: true\n", 4, "promot", "an unknown key", "did you mean promote?"),
    Broken("no queue of host memory", tier("{type: cpu, capacity: 1GiB, queue: 1GiB}"), 4, "tiers[1].queue", "an unknown key", "use one of type"),
    Broken("unknown codec", tier("{type: redis, url: redis://a, codec: planes}"), 4, "tiers[1].codec", "'planes'", "did you mean byteplanes?"),
    Broken("misspelt type key", tier("{tpye: cpu, capacity: 1GiB}"), 4, "tiers[1].tpye", "an unknown key", "did you mean type?"),
    Broken("a rate for a size", tier("{type: cpu, capacity: 200GB/s}"), 4, "tiers[1].capacity", "'200GB/s'", "use one of B, kB, MB, GB, TB, PB, KB, KiB, MiB, GiB, TiB, PiB, like 8GiB"),
    Broken("wrong unit", tier("{type: cpu, capacity: 8Gb}"), 4, "tiers[1].capacity", "'8Gb'", "use one of B, kB,"),
    Broken("negative size", tier("{type: cpu, capacity: -8GiB}"), 4, "tiers[1].capacity", "'-8GiB'", "write more than zero, like 8GiB"),
    Broken("size zero", tier("{type: cpu, capacity: 0}"), 4, "tiers[1].capacity", "0", "write more than zero, like 8GiB"),
    Broken("size infinite", tier("{type: cpu, capacity: .inf}"), 4, "tiers[1].capacity", ".inf", "like 8GiB"),
    Broken("no size", tier("{type: cpu, capacity: }"), 4, "tiers[1].capacity", "nothing", "like 8GiB"),
    Broken("two names alike", tier("{type: cpu, capacity: 1GiB, name: a}\n  - {type: cpu, capacity: 1GiB, name: a}"), 5, "tiers[2].name", "'a'", "tiers[1] has this name; give each its own"),
    Broken("bad name", tier("{type: cpu, capacity: 1GiB, name: my tier}"), 4, "tiers[1].name", "'my tier'", "use what matches"),
    Broken("name that is a number", tier("{type: cpu, capacity: 1GiB, name: 7}"), 4, "tiers[1].name", "7", "in quotes"),
    Broken("one path twice", tier("{type: disk, capacity: 1GiB, path: /a}\n  - {type: disk, capacity: 1GiB, path: /a}"), 5, "tiers[2].path", "'/a'", "tiers[1] keeps its blocks in the same place; write another path"),
    Broken("a recording in a tier's folder", tier("{type: disk, capacity: 1GiB, path: /a}\nrecord: {path: /a/trace}"), 5, "record.path", "'/a/trace'", "it is in the folder of tiers[1].path, which is that tier's alone; write another, as one beside that"),
    Broken("sockets in a tier's folder", tier("{type: shared, path: /a}\ncontrol: {folder: /a}"), 5, "control.folder", "'/a'", "it is in the folder of tiers[1].path"),
    Broken("announcements in a tier's folder", tier("{type: disk, capacity: 1GiB, path: /a}\nevents: {folder: /a/b/../c}"), 5, "events.folder", "'/a/b/../c'", "it is in the folder of tiers[1].path"),
    Broken("unknown type", tier("{type: dsk, capacity: 1GiB, path: /a}"), 4, "tiers[1].type", "'dsk'", "did you mean disk?"),
    Broken("unlike any type", tier("{type: s3, bucket: b}"), 4, "tiers[1].type", "'s3'", "use one of cpu, disk, object, redis, shared"),
    Broken("type of the wrong kind", tier("{type: [cpu]}"), 4, "tiers[1].type", "a list", "use one of cpu, disk, object, redis, shared"),
    Broken("no type", tier("{capacity: 1GiB}"), 4, "tiers[1].type", "nothing", "add type: one of cpu, disk, object, redis, shared"),
    Broken("no path", tier("{type: disk, capacity: 1GiB}"), 4, "tiers[1].path", "nothing", "add path: /var/lib/kvtiers"),
    Broken("no capacity", tier("{type: cpu}"), 4, "tiers[1].capacity", "nothing", "add capacity: 8GiB"),
    Broken("tier that is text", tier("cpu"), 4, "tiers[1]", "'cpu'", "write a mapping, like {type: cpu, capacity: 8GiB}"),
    Broken("a NUL in control.folder", tier("{type: cpu, capacity: 1GiB}\ncontrol: {folder: \"/run/a\\0b\"}"), 5, "control.folder", "'/run/a\\x00b'", "a path can't hold a NUL character"),
    Broken("tenants without any", tier("{type: cpu, capacity: 1GiB}\ntenants:"), 5, "tenants", "nothing", "write a mapping, a line key: value for each"),
    Broken("no tiers", "version: 1\n", 1, "tiers", "nothing", "add at least one tier"),
    Broken("tiers empty", "version: 1\ntiers: []\n", 2, "tiers", "an empty list", "add at least one tier"),
    Broken("tiers a mapping", "version: 1\ntiers: {type: cpu}\n", 2, "tiers", "a mapping", "write a list"),
    Broken("too many tiers", HEAD + CPU * 33, 2, "tiers", "a list", "keep 32 tiers at most"),
    Broken("bad scheme", tier("{type: redis, url: 'http://cache'}"), 4, "tiers[1].url", "'http://cache'", "what works is redis://"),
    Broken("no scheme", tier("{type: redis, url: 'cache:6379'}"), 4, "tiers[1].url", "'cache:6379'", "write it like redis://"),
    Broken("bad port", tier("{type: redis, url: 'redis://cache:99999'}"), 4, "tiers[1].url", "'redis://cache:99999'", "the port is not a number from 1 to 65535"),
    Broken("a password in a URL", tier("{type: redis, url: 'redis://u:hunter2@cache'}"), 4, "tiers[1].url", "'redis://u:***@cache'", "write the user as username: NAME and the place of the password as password: {file: /run/secrets/redis}"),
    Broken("a password in a URL's query", tier("{type: redis, url: 'redis://cache?password=hunter2'}"), 4, "tiers[1].url", "'redis://cache?password=***'", "write the user as username: NAME"),
    Broken("a variable in a URL", tier("{type: redis, url: 'redis://$REDIS_HOST:6379'}"), 4, "tiers[1].url", "'redis://$REDIS_HOST:6379'", "write what $REDIS_HOST stands for"),
    Broken("a variable in a path", tier("{type: disk, capacity: 1GiB, path: $HOME/kv}"), 4, "tiers[1].path", "'$HOME/kv'", "write what $HOME stands for: variables are not replaced here"),
    Broken("a variable in braces", tier('{type: disk, capacity: 1GiB, path: "/mnt/${DISK:-a}/kv"}'), 4, "tiers[1].path", "'/mnt/${DISK:-a}/kv'", "write what ${DISK:-a} stands for"),
    Broken("a variable in control.folder", tier("{type: cpu, capacity: 1GiB}\ncontrol: {folder: /run/$USER}"), 5, "control.folder", "'/run/$USER'", "write what $USER stands for"),
    Broken("size without unit", tier("{type: cpu, capacity: 8}"), 4, "tiers[1].capacity", "8", "a number alone is bytes; write its unit, like 8GiB"),
    Broken("size below a block", tier("{type: cpu, capacity: 8B}"), 4, "tiers[1].capacity", "'8B'", "8B is less than a block; write 4KiB or more, like 8GiB"),
    Broken("rate below a block", tier("{type: disk, path: /kv, capacity: 8GiB, store_rate: 8B/s}"), 4, "tiers[1].store_rate", "'8B/s'", "8B is less than a block; write 4KiB or more, like 8GiB"),
    Broken("size in megabytes without unit", tier("{type: disk, capacity: 65536, path: /a}"), 4, "tiers[1].capacity", "65536", "write its unit, like 65536MiB"),
    Broken("size without unit, in quotes", tier("{type: cpu, capacity: '8'}"), 4, "tiers[1].capacity", "'8'", "write its unit, like 8GiB"),
    Broken("tenant's name", tier("{type: cpu, capacity: 1GiB}\ntenants: {a: {name: (other)}}"), 5, "tenants.a.name", "'(other)'", "use what matches ^[A-Za-z0-9][A-Za-z0-9._-]*$"),
    Broken("quota without unit", tier("{type: cpu, capacity: 1GiB}\ntenants: {a: {quota: 20}}"), 5, "tenants.a.quota", "20", "write its unit, like 20GiB"),
    Broken("rate without unit", tier("{type: disk, capacity: 1GiB, path: /a, write_budget: 2/day}"), 4, "tiers[1].write_budget", "'2/day'", "write its unit, like 2GiB"),
    Broken("ghost without unit", tier("{type: cpu, capacity: 1GiB}\nghosts: [{tier: cpu, capacity: 64}]"), 5, "ghosts[0].capacity", "64", "write a size like 64GiB, or a factor like 2x"),
    Broken("duration without unit", tier("{type: redis, url: redis://a, ttl: 60}"), 4, "tiers[1].ttl", "60", "use one of ms, s, m, h, d, like 30s"),
    Broken("duration zero", tier("{type: redis, url: redis://a, timeout: 0s}"), 4, "tiers[1].timeout", "'0s'", "write more than zero, like 30s"),
    Broken("unknown codec", tier("{type: redis, url: redis://a, codec: zst}"), 4, "tiers[1].codec", "'zst'", "did you mean zstd?"),
    Broken("other version", f"version: 2\ntiers:\n{CPU}", 1, "version", "2", "this kvtiers understands version 1"),
    Broken("version as text", f"version: '1'\ntiers:\n{CPU}", 1, "version", "'1'", "understands version 1; write it without quotes"),
    Broken("no version", f"tiers:\n{CPU}", 1, "version", "nothing", "add version: 1"),
    Broken("unknown policy", f"{HEAD}{CPU}load_policy: fastest\n", 4, "load_policy", "'fastest'", "first"),
    Broken("promote neither way", f"{HEAD}{CPU}promote: perhaps\n", 4, "promote", "'perhaps'", "use true or false"),
    Broken("a percentage", f"{HEAD}{CPU}max_retained: 25%\n", 4, "max_retained", "'25%'", "write a number, like 0.25"),
    Broken("a count in words", tier("{type: cpu, capacity: 1GiB, store_threshold: two}"), 4, "tiers[1].store_threshold", "'two'", "write a whole number, like 2"),
    Broken("warm a size", tier("{type: disk, capacity: 1GiB, path: /a}\nwarm: 32GiB"), 5, "warm", "'32GiB'", "write its settings, like {bytes: 32GiB}"),
    Broken("salt a number", f"{HEAD}{CPU}salt: 5\n", 4, "salt", "a value not shown here", "write text"),
    Broken("list at the top", CPU, 1, "", "a list", "write version: 1 and tiers: at the top"),
    Broken("text at the top", "cpu\n", 1, "", "'cpu'", "write version: 1 and tiers: at the top"),
    Broken("empty", "", 1, "", "nothing", "write version: 1 and tiers:"),
    Broken("comments only", "# soon\n", 1, "", "nothing", "write version: 1 and tiers:"),
    Broken("key twice", tier("{type: cpu, capacity: 8GiB, capacity: 9GiB}"), 4, "", "the key capacity again, after line 4", "keep one of them"),
    Broken("open bracket", f"{HEAD}  - {{type: cpu, capacity: 8GiB\n", 4, "", "invalid YAML", "close the bracket"),
    Broken("open quote", f'{HEAD}  - type: "cpu\n', 4, "", "invalid YAML", "close the quote"),
    Broken("tab", f"{HEAD}\t- type: cpu\n", 3, "", "invalid YAML", "indent with spaces, not tabs"),
    Broken("bad indentation", f"{HEAD}  - type: cpu\n   capacity: 8GiB\n", 4, "", "invalid YAML", "give the keys of one mapping the same indent"),
    Broken("colon in text", f"{HEAD}  - type: cpu: x\n", 3, "", "invalid YAML", "put a value with a colon in quotes"),
    Broken("alias to nothing", f"{HEAD}  - *cpu\n", 3, "", "invalid YAML", "begins with * in quotes"),
    Broken("tag", f"{HEAD}  - !cpu 8GiB\n", 3, "", "invalid YAML", "begins with ! in quotes"),
    Broken("two documents", f"{HEAD}{CPU}---\n{HEAD}{CPU}", 4, "", "invalid YAML", "keep one document, without ---"),
    Broken("not UTF-8", b"version: 1\ntiers: caf\xe9\n", 2, "", "the byte 0xe9, which is not UTF-8", "save the file as UTF-8"),
    Broken("control character", "version: 1\ntiers: \x07\n", 2, "", "the character U+0007", "remove it"),
]  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN, ids=[broken.name for broken in BROKEN])
def test_one_line_says_where_what_and_what_now(
    kvtiers: Callable[..., tuple[int, str, str]], tmp_path: Path, broken: Broken
) -> None:
    path = tmp_path / "chain.yaml"
    text = broken.text
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    status, out, err = kvtiers("validate", path)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1 and "Traceback" not in err and "hunter2" not in err
    key = f"{broken.key}: " if broken.key else ""
    start = f"{path}:{broken.line}: {key}found {broken.found}"
    assert err.startswith(start), f"expected {start}\n  found  {err}"
    assert broken.remedy in err.removeprefix(start)
    assert re.search(r"found .+; .+\n$", err)


@pytest.mark.parametrize(
    ("path", "found", "remedy"),
    [
        ("missing.yaml", "no such file", "write the path"),
        (".", "a folder", "write the path"),
        ("huge.yaml", "more than 1 MiB", "a chain is some lines"),
        ("/proc/self/mem", "no readable file (Input/output error)", "write another path"),
        ("huge.yaml/chain.yaml", "no readable file (Not a directory)", "write another path"),
    ],
)
@pytest.mark.parametrize("command", ["validate", "config"])
def test_files_that_cannot_be_read(
    kvtiers: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    command: str,
    path: str,
    found: str,
    remedy: str,
) -> None:
    (tmp_path / "huge.yaml").write_bytes(b"# more\n" * 200_000)
    status, out, err = kvtiers(command, tmp_path / path)
    assert (status, out) == (2, "")
    assert err.startswith(f"{tmp_path / path}: found {found}; {remedy}")
    assert len(err.splitlines()) == 1


def test_several_problems_are_a_line_each(
    kvtiers: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    path = tmp_path / "chain.yaml"
    path.write_text(f"{HEAD}  - {{type: cpu, capacity: 0}}\n  - {{type: redis, ttl: 1}}\n")
    status, _, err = kvtiers("validate", path)
    keys = [line.split(": ")[1] for line in err.splitlines()]
    assert (status, keys) == (2, ["tiers[0].capacity", "tiers[1].url", "tiers[1].ttl"])
