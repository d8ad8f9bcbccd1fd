"""Disk tier, raw loop and one file per block in a process with too little memory for what they
hold, for the suite disk: `python -m bench.squeezed FOLDER BLOCKS BLOCK_BYTES [GROUP]`.

Reads names of measures, one a line, and answers each with GB/s. GROUP: a memory control group
(version 1) to join first.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.disk_batch import Bench
from bench.report import Measure

BATCHES = 16
"""What is held: 2 GiB of batches of 64 blocks of 2 MiB."""
LIMIT_BYTES = 512 << 20
_CHECKOUT = Path(__file__).parents[1]
_GROUPS = Path("/sys/fs/cgroup/memory")


class Squeezed:
    """The other end: starts that process and asks it. Raises OSError where no limit can be set."""

    def __init__(self, folder: Path, blocks: int, block_bytes: int, stack: ExitStack) -> None:
        prefix, group = stack.enter_context(_limited())
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "bench.squeezed", str(folder), str(blocks),
             str(block_bytes), *group],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_CHECKOUT,
            text=True,
        )  # fmt: skip
        stack.callback(self._close)

    def measure(self, name: str) -> Measure:
        """One of `_measures`."""

        def run() -> float:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            print(name, file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
            if not line:
                raise RuntimeError("the process under a memory limit ended")
            return float(line)

        return run

    def _close(self) -> None:
        self._process.communicate()


@contextmanager
def _limited() -> Iterator[tuple[list[str], list[str]]]:
    """A command to put before another, and arguments to put behind, so that it has a limit."""
    user = [] if os.geteuid() == 0 else ["--user"]
    scope = ["systemd-run", *user, "--scope", "-q", "-p", f"MemoryMax={LIMIT_BYTES}",
             "-p", "MemorySwapMax=0"]  # fmt: skip
    if _works([*scope, "true"]):
        yield scope, []
        return
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    ours = [line.split(":", 2)[2] for line in lines if line.split(":", 2)[1] == "memory"]
    if not ours:
        raise OSError("no systemd-run and no memory control group to set a limit with")
    # Below the group that this process is in, so that its limits hold as well.
    group = _GROUPS / ours[0].lstrip("/") / f"kvtiers-bench-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
        yield [], [str(group)]
    finally:
        group.rmdir()


def _works(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=10).returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


def main() -> None:
    """Serve until standard input ends."""
    folder, blocks, block_bytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for group in sys.argv[4:]:
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    with ExitStack() as stack:
        measures = _measures(folder, blocks, block_bytes, stack)
        for line in sys.stdin:
            print(measures[line.strip()](), flush=True)


def _measures(folder: Path, blocks: int, block_bytes: int, stack: ExitStack) -> dict[str, Measure]:
    """Loads at random from all that is held, and replacement."""
    bench = Bench(folder, blocks, block_bytes, BATCHES, stack)
    tier, files, raw = bench.tier("auto"), bench.files(), bench.raw(direct=True)
    every, chance = range(BATCHES * blocks), random.Random(0)

    def anywhere() -> list[int]:
        return chance.sample(every, blocks)

    return {
        "load": bench.rate(lambda: tier.load(anywhere())),
        "load raw": bench.rate(lambda: raw.load(bench.payloads, anywhere())),
        "load files": bench.rate(lambda: files.load(bench.payloads, anywhere())),
        "store": bench.rate(tier.store),
        "store raw": bench.rate(lambda: raw.store(bench.payloads)),
        "store files": bench.rate(lambda: files.store(bench.payloads)),
    }


if __name__ == "__main__":
    main()
