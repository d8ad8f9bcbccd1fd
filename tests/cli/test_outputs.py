"""Where results go: a file is written whole or not at all, and nothing else is lost for it."""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Ran
from tiers.cli import arguments
from tiers.cli.arguments import CannotWrite, write_result

Kvtiers = Callable[..., Ran]
KVTIERS = str(Path(sys.executable).parent / "kvtiers")
CHAIN = "version: 1\ntiers:\n- {type: cpu, capacity: 1MiB}\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n'
    )
    return path


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    path = tmp_path / "chain.yaml"
    path.write_text(CHAIN)
    return path


@pytest.mark.parametrize("kind", ["pipe", "link to it"])
def test_what_is_no_file_is_written_and_stays(tmp_path: Path, kind: str) -> None:
    """As root, `--json /dev/null` put a file in the place of the device."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    path = pipe
    if kind != "pipe":
        path = tmp_path / "link"
        path.symlink_to(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_result(path, {"a": 1})
        assert os.read(reader, 100) == b'{\n "a": 1\n}\n'
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_what_a_link_names_is_written_and_the_link_stays(tmp_path: Path) -> None:
    link, place = tmp_path / "link.json", tmp_path / "folder" / "real.json"
    place.parent.mkdir()
    link.symlink_to(place)
    write_result(link, 7)
    assert link.is_symlink()
    assert place.read_text() == "7\n"


def test_what_was_there_keeps_its_owner_and_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a chain with the salts of tenants, that its engine alone may read, is for all."""
    path, given = tmp_path / "chain.yaml", list[tuple[int, int]]()
    monkeypatch.setattr(os, "fchown", lambda _, user, group: given.append((user, group)))
    path.touch(0o604)
    write_result(path, 7)
    found = path.stat()
    assert stat.S_IMODE(found.st_mode) == 0o604
    assert given == [(found.st_uid, found.st_gid)]


@pytest.mark.parametrize("error", [errno.EPERM, errno.EINVAL])
def test_an_owner_that_can_not_be_given_keeps_no_result_from_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """EINVAL: as in a container, whose users are mapped, for a file of one who is not."""

    def fchown(*_: int) -> None:
        raise OSError(error, os.strerror(error))

    path = tmp_path / "result.json"
    path.touch(0o604)
    monkeypatch.setattr(os, "fchown", fchown)
    write_result(path, 7)
    assert path.read_text() == "7\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


def test_a_link_in_the_draft_s_place_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "token_hex", lambda size: "known")
    (tmp_path / ".out.known.json").symlink_to(tmp_path / "of somebody")
    with pytest.raises(CannotWrite, match="File exists"):
        write_result(tmp_path / "out.json", 7)
    assert [*tmp_path.iterdir()] == [tmp_path / ".out.known.json"]


def test_a_disk_that_is_full_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_result(path, "before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(CannotWrite, match="it can't be written: File too large"):
            write_result(path, "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == '"before"\n'
    assert [*tmp_path.iterdir()] == [path]


def test_a_place_that_takes_no_result_is_refused(
    kvtiers: Kvtiers, trace: Path, chain: Path, tmp_path: Path
) -> None:
    before = trace.read_bytes()
    for place, why in (
        (tmp_path, "found a folder; write the path of a file"),
        ("", "found a folder; write the path of a file"),
        (tmp_path / "none" / "a.json", "its folder is not there, or can't be written to"),
        (trace, "it is written or read already; name another file"),
    ):
        ran = kvtiers("curve", trace, "--json", place)
        assert (ran.status, ran.out) == (2, "")
        assert ran.err == f"{Path(place)}: {why}\n"
    assert trace.read_bytes() == before
    ran = kvtiers("bench", "--chain", chain, "--save", chain)
    assert (ran.status, chain.read_text()) == (2, CHAIN) and "read already" in ran.err
    for command, *options in (
        ("tune", "--budget", trace, "--chain", chain, "--out", chain),
        ("tune", "--budget", trace, "--judge", chain, "--out", chain),
        ("replay", "--profile", trace, "--chain", chain, "--json", chain),
        ("replay", "--profile", chain, "--chain", trace, "--json", chain),
        ("recommend", "--chain", chain, "--output", chain),
    ):
        ran = kvtiers(command, trace, *options)
        assert ran.err == f"{chain}: it is written or read already; name another file\n"
        assert (ran.status, chain.read_text()) == (2, CHAIN)


def test_a_result_on_standard_output_is_alone_there(
    kvtiers: Kvtiers, trace: Path, chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It made a file called -."""
    monkeypatch.chdir(tmp_path)
    ran = kvtiers("curve", trace, "--json", "-")
    assert (ran.status, json.loads(ran.out)["trace"]) == (0, str(trace))
    assert "1 requests, 1,024 prompt tokens" in ran.err
    ran = kvtiers("bench", "--chain", chain, "--save", "-")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("-: --json alone writes to standard output")
    assert {*tmp_path.iterdir()} == {trace, chain}
    assert "1 requests" in kvtiers("curve", trace).out


@pytest.mark.parametrize("command", ["validate", "config"])
def test_an_output_that_is_full_or_closed_ends_without_a_traceback(
    chain: Path, command: str
) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [KVTIERS, command, chain], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.stderr == "the command was stopped: No space left on device\n"
    assert done.returncode == 1
    closed = f'exec "{KVTIERS}" {command} "{chain}" >&-'
    done = subprocess.run(["sh", "-c", closed], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_lines_that_would_fold_need_no_output() -> None:
    """doctor ended with a traceback: nobody asks a closed output whether it is a terminal."""
    closed = ["sh", "-c", f'exec "{KVTIERS}" doctor >&-']
    done = subprocess.run(closed, stderr=subprocess.PIPE, text=True)
    assert (done.returncode in (0, 1), done.stderr) == (True, "")


def test_a_reader_that_has_read_enough_spoils_nothing(trace: Path, tmp_path: Path) -> None:
    """`kvtiers curve | head -1` ended with 1, and wrote no JSON."""
    result = tmp_path / "out.json"
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as unread:
        done = subprocess.run(
            [KVTIERS, "curve", trace, "--json", result],
            stdout=unread,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert result.exists()
