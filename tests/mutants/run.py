"""Runs the kit on mutants, each in a process of its own, several at a time."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import SkipTest

from tests.mutants.mutant import ROOT, Mutant

SECONDS = 400.0
"""A kit that has not ended by then hangs: that catches nothing."""
TEST_SECONDS = 25.0
"""What the kit gives one test here, so that an endless verb fails it soon."""
CHILD = "test_another_process_sees_what_was_put"
"""The kit's slowest test: it runs last."""

OpenKit = Callable[[Path], Any]
"""Makes an object of a kit's class for an empty folder."""


@dataclass(frozen=True)
class Outcome:
    """How a mutant fared. `test`: the one that failed; empty: the kit passed, or hung."""

    mutant: Mutant
    test: str
    why: str
    seconds: float

    @property
    def is_caught(self) -> bool:
        return bool(self.test)


def try_mutants(
    mutants: Iterable[Mutant],
    kits: dict[str, OpenKit],
    replaced: Set[str] = frozenset(),
    beside: int = 2,
) -> Iterator[Outcome]:
    """Run the kit on each, `beside` at a time; yields as they end.

    The modules that mutants are of must not have been imported by this process, unless their kits
    import them anew (`replaced`).
    """
    waiting = list(mutants)[::-1]
    running: list[_Run] = []
    while waiting or running:
        while waiting and len(running) < beside:
            mutant = waiting.pop()
            imported = sys.modules.keys() - replaced
            assert mutant.module not in imported, f"{mutant.module} is imported already"
            running.append(_Run(mutant, kits[mutant.store]))
        select.select([run.pipe for run in running], [], [], 0.5)
        for run in list(running):
            if (outcome := run.ended()) is not None:
                running.remove(run)
                yield outcome


class _Run:
    """A child that runs the kit on one mutant."""

    def __init__(self, mutant: Mutant, open_kit: OpenKit) -> None:
        self.mutant = mutant
        self._began = time.monotonic()
        self._folder = tempfile.mkdtemp(prefix="kvtiers-mutant-")
        self.pipe, theirs = os.pipe()
        self._child = os.fork()
        if not self._child:
            os.setpgid(0, 0)
            _child(mutant, open_kit, Path(self._folder), theirs)
        os.close(theirs)

    def ended(self) -> Outcome | None:
        """What became of it, or None while it runs."""
        seconds = time.monotonic() - self._began
        is_late = seconds > SECONDS
        if not is_late and not select.select([self.pipe], [], [], 0)[0]:
            return None
        said = b"" if is_late else os.read(self.pipe, 1 << 16)
        if said or is_late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child, signal.SIGKILL)  # and the processes that the kit started
        signalled = os.WTERMSIG(os.waitpid(self._child, 0)[1])
        os.close(self.pipe)
        shutil.rmtree(self._folder, ignore_errors=True)
        test, why = "", "the kit hangs" if is_late else "it died"
        if said:
            test, why = json.loads(said)
        elif signalled:  # which no author of a store can overlook
            test, why = "the process", f"ended by {signal.Signals(signalled).name}"
        return Outcome(self.mutant, test, why, seconds)


def _child(mutant: Mutant, open_kit: OpenKit, folder: Path, pipe: int) -> None:
    """Say what failed first, and end."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        sys.meta_path.insert(0, _Finder(mutant))
        os.write(pipe, json.dumps(_first_failure(open_kit, folder)).encode())
    finally:
        os._exit(0)


def _first_failure(open_kit: OpenKit, folder: Path) -> tuple[str, str]:
    try:
        names = [name for name in dir(open_kit(folder)) if name.startswith("test_")]
    except Exception as error:  # noqa: BLE001 - so has what can't even be imported
        return "import", repr(error)[:200]
    for number, name in enumerate(sorted(names, key=CHILD.__eq__)):
        place = folder / str(number)
        place.mkdir()
        kit = open_kit(place)
        kit.limit_seconds = TEST_SECONDS
        try:
            getattr(kit, name)()
        except SkipTest:
            pass
        except Exception as error:  # noqa: BLE001 - whatever fails has caught the mutant
            return name, repr(error)[:200]
    return "", ""


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the mutant's module, with its source."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._mutant.module:
            return None
        file = str(ROOT / self._mutant.file)
        loader = _Loader(name, file, self._mutant)
        return importlib.util.spec_from_file_location(name, file, loader=loader)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, file: str, mutant: Mutant) -> None:
        super().__init__(name, file)
        self._mutant = mutant

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self._mutant.source().encode(), self.path)
