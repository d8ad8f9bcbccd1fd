"""A check costs its own process at most: it may hang, die, raise, print and leave children."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from spec.findings import GRAVITIES, DoctorFinding
from tests.support.clock import wait_for
from tiers.doctor.isolated import Check, run
from tiers.errors import TierUnusable

SILENT = DoctorFinding("error", "it hangs")
FIRST = DoctorFinding("note", "first", "do that", "a euro")


def results(findings: object, seconds: float = 60.0) -> list[DoctorFinding]:
    assert callable(findings)
    (*found,) = run([Check("it", findings, SILENT, seconds)])
    assert {each.about for each in found} <= {"it"}
    return [each.finding for each in found]


def test_findings_come_in_order_and_whole() -> None:
    second = DoctorFinding("fine", "ein\nUmlaut ü")
    assert results(lambda: [FIRST, second]) == [FIRST, DoctorFinding("fine", "ein\\nUmlaut ü")]
    assert results(list) == []


def test_more_findings_than_a_pipe_holds() -> None:
    many = [DoctorFinding("fine", "x" * 1000)] * 500
    assert results(lambda: many) == many
    first, *_, last = results(lambda: itertools.repeat(many[0]))
    assert (first, last) == (many[0], SILENT)


def test_one_that_hangs_is_left_behind_with_what_it_found(tmp_path: Path) -> None:
    """What it has started, such as a tool, ends with it."""
    os.mkfifo(tmp_path / "fifo")

    def hang() -> Iterator[DoctorFinding]:
        yield FIRST
        tool = subprocess.Popen(["sleep", "1000"])
        (tmp_path / "pids").write_text(f"{os.getpid()} {tool.pid}")
        (tmp_path / "fifo").open()

    assert results(hang, 2.0) == [FIRST, SILENT]
    check, tool = map(int, (tmp_path / "pids").read_text().split())
    with suppress(ChildProcessError):
        os.waitpid(check, 0)
    wait_for(lambda: not os.path.exists(f"/proc/{tool}/exe"))


HANGS = """
import os, sys
from spec.findings import DoctorFinding
from tiers.doctor.isolated import Check, run

def hang():
    print(os.getpid(), file=open(sys.argv[1] + "/pid", "w"), flush=True)
    os.kill(os.getppid(), 9)
    open(sys.argv[1] + "/fifo")
    yield DoctorFinding("fine", "never")

run([Check("it", hang, DoctorFinding("error", "it hangs"), 1.0)])
"""


def test_one_that_hangs_ends_though_the_command_was_killed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    command = [sys.executable, "-c", HANGS, str(tmp_path)]
    assert subprocess.run(command, stdin=subprocess.DEVNULL).returncode == -signal.SIGKILL
    pid = int((tmp_path / "pid").read_text())
    while Path(f"/proc/{pid}/fd").exists() and os.path.exists(f"/proc/{pid}/exe"):
        time.sleep(0.05)  # pytest's own limit ends it where it stays


def test_one_that_dies_is_named_and_the_others_end() -> None:
    def die() -> Iterator[DoctorFinding]:
        yield FIRST
        os.kill(os.getpid(), signal.SIGKILL)

    other = Check("other", lambda: [FIRST], SILENT)
    found = run([Check("dies", die, SILENT), other])
    assert [(each.about, each.finding) for each in found] == [
        ("dies", FIRST),
        ("dies", SILENT),
        ("other", FIRST),
    ]


def test_what_our_code_raises_and_logs_are_findings() -> None:
    def raising() -> Iterator[DoctorFinding]:
        logging.getLogger("tiers.remote.spec").warning("anybody can %s", "listen")
        yield FIRST
        raise TierUnusable("/kv is a file; a tier needs a folder; name a folder")

    wrong = DoctorFinding("error", "/kv is a file; a tier needs a folder", "name a folder")
    assert results(raising) == [DoctorFinding("warning", "anybody can listen"), FIRST, wrong]


def test_a_plugins_mistake_is_no_error_of_the_place() -> None:
    def mistaken() -> Iterator[DoctorFinding]:
        raise TypeError("no such thing")
        yield FIRST

    (found,) = results(mistaken)
    assert found.gravity == "can't tell" and "TypeError: no such thing" in found.found


def test_prints_are_not_mixed_into_the_result(capfd: pytest.CaptureFixture[str]) -> None:
    def talking() -> Iterator[DoctorFinding]:
        print("hello", flush=True)
        os.write(2, b"hello")
        yield FIRST

    assert results(talking) == [FIRST]
    assert capfd.readouterr() == ("", "")


def test_gravities() -> None:
    assert GRAVITIES == ("error", "warning", "note", "can't tell", "fine")
    with pytest.raises(ValueError, match="use one of error, warning"):
        DoctorFinding("bad", "x")  # type: ignore[arg-type]
