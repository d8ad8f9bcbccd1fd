"""Programs of ours that have vLLM imported as they begin, which takes longest of an engine's
start."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.engine.conftest import do_job

_ASKING = threading.Lock()
KILLED = -signal.SIGKILL


class Program:
    """What `subprocess.Popen` gives of `python -m`, with pipes: a fork of the process of
    `vllm_jobs`, in a process group of its own."""

    def __init__(
        self,
        jobs: subprocess.Popen[str],
        module: str,
        env: Mapping[str, str],
        arguments: Sequence[str] = (),
        errors: bool = False,
        log: Path | None = None,
    ) -> None:
        """`env`: what it has beside that process's own. `errors`: in its output, too. `log`: a file
        that its output goes to."""
        (stdin, to_it), (output, stdout), (self._ended, status) = (os.pipe() for _ in range(3))
        theirs = [stdin, stdout, status]
        pipes = [f"/proc/{os.getpid()}/fd/{one}" for one in theirs]
        pipes[1] = pipes[1] if log is None else str(log)
        job: dict[str, Any] = {"module": module, "arguments": [*arguments], "env": dict(env)}
        with _ASKING:
            self.pid = int(do_job(jobs, {**job, "pipes": pipes, "errors": errors}))
        for one in theirs:
            os.close(one)
        self.stdin, self.stdout = os.fdopen(to_it, "w"), os.fdopen(output, errors="replace")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status, if it has ended."""
        with suppress(TimeoutError):
            self.wait(0)
        return self.returncode

    def terminate(self) -> None:
        """Ask it to end."""
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it, and all that it has begun."""
        os.killpg(self.pid, signal.SIGKILL)

    def communicate(self, given: str) -> str:
        """Send it all of its input; what it printed until it ended."""
        with self.stdin:
            self.stdin.write(given)
        with self.stdout:
            said = self.stdout.read()
        self.wait()
        return said

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, once it has ended."""
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise TimeoutError(f"it has not ended after {timeout} s")
            self.returncode = int(os.read(self._ended, 100) or KILLED)
            os.close(self._ended)
        return self.returncode


def programs(jobs: subprocess.Popen[str]) -> Any:
    """In place of `subprocess` where it begins a module that prints no errors."""

    def begin(command: Sequence[str], env: Mapping[str, str], **_: Any) -> Program:
        flag, module, arguments = command[1], command[2], command[3:]
        assert flag == "-m"
        return Program(jobs, module, env, arguments)

    return SimpleNamespace(Popen=begin, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
