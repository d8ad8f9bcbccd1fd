"""Runs checks side by side, each in a process of its own, for a bounded time.

A check asks what an engine will ask: file systems that may hang so that no signal ends the asking
thread, indexes whose pages may be torn, code of plugins. It costs the process that runs it, at
most; nothing waits for that process once its time is over.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import wait
from typing import Any, NoReturn

from spec.errors import describe_error, one_line
from spec.findings import DoctorFinding
from tiers.errors import KVTiersError

SECONDS = 20.0
"""Limit for a check. A tier that opens later than 10 s after an engine's start joins late."""

_PIECE = 1 << 16
_MOST = 1 << 20
"""Bytes of findings that are read of one check."""
_DESCRIPTORS = 4096
"""Handles that a check's process closes: others may wait for the end of what they write to."""


@dataclass(frozen=True)
class Check:
    """`about`: the tier or subject. `silent`: the finding if it does not end."""

    about: str
    findings: Callable[[], Iterable[DoctorFinding]]
    silent: DoctorFinding
    seconds: float = SECONDS


@dataclass(frozen=True)
class Found:
    """A finding, and its subject."""

    about: str
    finding: DoctorFinding


@dataclass
class _Running:
    check: Check
    pid: int
    ends: float
    text: bytes = b""


def run(checks: Sequence[Check]) -> list[Found]:
    """Run the checks at once; return their findings in the checks' order. Forks, so call it before
    threads are started."""
    running: dict[int, _Running] = {}
    try:
        for check in checks:
            pipe, pid = _start(check)
            running[pipe] = _Running(check, pid, time.monotonic() + check.seconds)
        _read_all(running)
    finally:
        for pipe, each in running.items():
            _end(each.pid)
            os.close(pipe)
    return [Found(each.check.about, found) for each in running.values() for found in _results(each)]


def _read_all(running: dict[int, _Running]) -> None:
    """Read until each check has ended, or its time is over."""
    left = set(running)
    while left:
        ends = min(running[pipe].ends for pipe in left)
        ready: list[Any] = wait(left, max(0.0, ends - time.monotonic()))
        for pipe in ready:
            piece = os.read(pipe, _PIECE)
            running[pipe].text += piece
            if not piece or len(running[pipe].text) > _MOST:
                running[pipe].ends = 0.0
        left = {pipe for pipe in left if running[pipe].ends > time.monotonic()}


def _results(each: _Running) -> list[DoctorFinding]:
    *lines, rest = each.text.decode().split("\n")
    found = [DoctorFinding(**json.loads(line)) for line in lines if line]
    # The last line is empty, and sent when the check has ended.
    if lines and lines[-1] == "" and not rest:
        return found
    return [*found, each.check.silent]


def _end(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # also what it has started, such as a tool
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _start(check: Check) -> tuple[int, int]:
    """Fork a process for the check; return where its findings come from, and its number."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        _work(check, theirs)
    os.close(theirs)
    with suppress(OSError):
        os.setpgid(pid, pid)
    return ours, pid


def _work(check: Check, pipe: int) -> NoReturn:
    """In the forked process: send the findings, one a line, and end."""

    def send(finding: DoctorFinding) -> None:
        shown = {key: one_line(str(value)) for key, value in asdict(finding).items()}
        os.write(pipe, json.dumps(shown).encode() + b"\n")

    try:
        with suppress(OSError):
            os.setpgid(0, 0)
        signal.alarm(int(check.seconds) + 2)  # it ends, too, if the command was killed before
        # Nobody who waits for the end of our output may wait for this process.
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        os.closerange(3, pipe)
        os.closerange(pipe + 1, _DESCRIPTORS)
        sys.stdout = sys.stderr = os.fdopen(1, "w")
        for ours in ("tiers", "spec"):
            logging.getLogger(ours).addHandler(_AsFindings(send))
        try:
            for finding in check.findings():
                send(finding)
        except (KVTiersError, OSError) as error:
            send(DoctorFinding.of_line("error", str(error)))
        except Exception as error:  # noqa: BLE001 - a plugin's may raise anything
            what = f"its check failed ({describe_error(error)})"
            send(replace(check.silent, gravity="can't tell", found=what))
        os.write(pipe, b"\n")
    finally:
        os._exit(0)


class _AsFindings(logging.Handler):
    """Warnings that our own code logs meanwhile, as findings."""

    def __init__(self, send: Callable[[DoctorFinding], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(DoctorFinding("warning", record.getMessage()))
