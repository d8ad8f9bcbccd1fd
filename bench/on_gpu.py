"""What a machine with a GPU shows: tests/gpu, the replay engine's among them, and `bench gpu`.

    python -m bench.on_gpu [FILE]      make gpu

Writes JSON as `bench --json` does, with what the parts printed, and anew after each part, so that
one that hangs costs no other before it. Needs a GPU, PyTorch, pytest, what kvtiers imports, and no
network; without a GPU it says so in the same form, and ends with 1.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.report import machine

ROOT = Path(__file__).parents[1]
FILE = ROOT / "build" / "gpu.json"
TAIL = 4000
"""Characters that are kept of what a part printed."""


class Part(NamedTuple):
    """A command, and the seconds that it may take: ten minutes for all, with time to spare."""

    name: str
    command: Sequence[str]
    seconds: float


def parts(rows: Path) -> list[Part]:
    """What is run. `rows`: where the benchmark writes."""
    python = sys.executable
    # Of tests/conftest.py they need nothing, and that needs servers.
    tests = [python, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "tests/gpu"]
    command = "from tiers.cli.main import main; main()"
    bench = [python, "-c", command, "bench", "gpu", "--rounds", "3", "--json", str(rows)]
    return [Part("tests", tests, 240), Part("bench", bench, 300)]


def run(part: Part) -> dict[str, Any]:
    """Run a part, and end it when its time is over; what came of it."""
    began = time.monotonic()
    try:
        ended = subprocess.run(
            part.command,
            cwd=ROOT,
            timeout=part.seconds,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        code, said = ended.returncode, ended.stdout
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        code, said = None, output.decode(errors="replace") if isinstance(output, bytes) else output
    return {
        "passed": code == 0,
        "exit": code,
        "seconds": round(time.monotonic() - began, 1),
        "output": said[-TAIL:],
    }


def main(file: Path = FILE) -> int:
    """Run all parts and write `file`; 0 if there is a GPU and every part passed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = file.with_suffix(".rows.json")
    rows.unlink(missing_ok=True)
    here = machine()
    said: dict[str, Any] = {"machine": here, "parts": {}, "rows": []}
    for part in parts(rows):
        said["parts"][part.name] = result = run(part)
        if rows.exists():
            said["rows"] = json.loads(rows.read_text())["rows"]
        file.write_text(json.dumps(said, indent=1) + "\n")
        print(f"{part.name}: exit {result['exit']} after {result['seconds']} s")
        print(result["output"])
    print(f"{file}: {here['gpu'] or 'no CUDA device here'}")
    passed = all(one["passed"] for one in said["parts"].values())
    return 0 if passed and here["gpu"] else 1


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
