"""What a machine with a GPU shows, in the order of what is wanted first: facts of the machine, the
tests that need a device, copies beside their peers, `bench gpu`, and the tests once more under
compute-sanitizer, where that is.

    python -m bench.on_gpu [FILE] [--seconds 590]      make gpu

Writes JSON as `bench --json` does, with what the parts printed, and anew after each part, so that
one that hangs costs no other before it. Needs a GPU, PyTorch, pytest, what kvtiers imports, and no
network; without a GPU it says so in the same form, and ends with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu_facts import facts
from bench.report import machine

ROOT = Path(__file__).parents[1]
FILE = ROOT / "build" / "gpu.json"
TAIL = 12_000
"""Characters that are kept of what a part printed."""
SECONDS = 590.0
"""All parts together; one that begins late has what is left."""


class Part(NamedTuple):
    """A command, the seconds that it may take, and the file of its rows. `missing`: why it can't
    run here; that is no failure."""

    name: str
    command: Sequence[str]
    seconds: float
    rows: Path | None = None
    missing: str = ""


def parts(folder: Path) -> list[Part]:
    """What is run. `folder`: where the benchmarks write."""
    python = sys.executable
    # Of tests/conftest.py they need nothing, and that needs servers.
    quiet = ["-q", "--noconftest", "-p", "no:cacheprovider", "-p", "bench.device_cases"]
    tests = [python, "-m", "pytest", *quiet, "tests/gpu"]
    copies, suite = folder / "copies.json", folder / "suite.json"
    peers = [python, "-m", "bench.gpu_peers", str(copies)]
    bench = [python, "-m", "bench", "gpu", "--rounds", "3", "--json", str(suite)]
    checker = sanitizer()
    return [
        Part("tests", tests, 120),
        Part("copies", peers, 120, copies),
        Part("bench", bench, 240, suite),
        Part(
            "memcheck",
            # A test pins memory twice: errors that the driver answers are none of memory.
            [str(checker), "--report-api-errors", "no", "--error-exitcode", "9", *tests],
            180,
            missing="" if checker else "compute-sanitizer is not here",
        ),
    ]


def sanitizer() -> Path | None:
    """NVIDIA's checker of device memory, on the path or where CUDA is usually installed."""
    found = shutil.which("compute-sanitizer")
    places = [Path(found)] if found else sorted(Path("/usr/local").glob("cuda*/bin/compute-sanit*"))
    return places[0] if places else None


def run(part: Part, left: float = SECONDS) -> dict[str, Any]:
    """Run a part, and end it when its time is over, or what is `left` of all; what came of it."""
    if part.missing:
        return {"passed": None, "exit": None, "seconds": 0.0, "output": part.missing}
    if left <= 0:
        return {"passed": False, "exit": None, "seconds": 0.0, "output": "no time was left for it"}
    began = time.monotonic()
    said, code = in_time(part.command, min(part.seconds, left))
    return {
        "passed": code == 0,
        "exit": code,
        "seconds": round(time.monotonic() - began, 1),
        "output": said[-TAIL:],
    }


def in_time(
    command: Sequence[str], seconds: float, given: str = "", env: Mapping[str, str] | None = None
) -> tuple[str, int | None]:
    """Run a command in a process group of its own, which is ended when its time is over; what it
    printed, and its exit status: None of one that had to be ended."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(given, timeout=seconds)
        return said, process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # what it began holds the output, and a GPU, too
        said, _ = process.communicate()
        return said, None


def main(file: Path = FILE, seconds: float = SECONDS) -> int:
    """Run all parts and write `file`; 0 if there is a GPU and every part passed that could run.
    `seconds`: all parts together."""
    began = time.monotonic()
    folder = file.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    here = {**machine(), "device": facts()}
    said: dict[str, Any] = {"machine": here, "parts": {}, "rows": []}
    write(file, said)
    for part in parts(folder):
        if part.rows is not None:
            part.rows.unlink(missing_ok=True)
        said["parts"][part.name] = result = run(part, seconds - (time.monotonic() - began))
        if part.rows is not None and part.rows.exists():
            said["rows"] += json.loads(part.rows.read_text())["rows"]
        write(file, said)
        print(f"{part.name}: exit {result['exit']} after {result['seconds']} s")
        print(result["output"], flush=True)
    print(f"{file}: {here['gpu'] or 'no CUDA device here'}")
    failed = any(one["passed"] is False for one in said["parts"].values())
    return 0 if not failed and here["gpu"] else 1


def write(file: Path, said: dict[str, Any]) -> None:
    """Write what is known so far; a machine that goes away leaves a whole file."""
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps(said, indent=1) + "\n")
    fresh.replace(file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=FILE)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    given = parser.parse_args()
    sys.exit(main(given.file, given.seconds))
