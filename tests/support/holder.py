"""Another process that evicts for all on a place, until it is killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HOLDS = """
import sys, time
from pathlib import Path
from {module} import {opens}

kept = {opens}(Path(sys.argv[1]), 10**9)
while not kept._evictor._count.round:
    time.sleep(0.01)
print("holds", flush=True)
time.sleep(600)
"""


@contextmanager
def held_elsewhere(module: str, opens: str, place: Path) -> Iterator[None]:
    """Within it another process has opened the place by `opens(place, capacity)` of a module, and
    holds its lease; behind it that one has been killed."""
    program = _HOLDS.format(module=module, opens=opens)
    command = [sys.executable, "-c", program, str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == b"holds\n"
            yield
        finally:
            holder.kill()
