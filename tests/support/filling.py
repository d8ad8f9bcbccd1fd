"""Processes that fill a tier together, beyond its capacity."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from typing import Any

from spec.offloading import StoreContext
from tiers.remote.object import upkeep as object_upkeep
from tiers.remote.object_spec import ObjectSpec
from tiers.remote.packs.evictor import Pause
from tiers.testing import Memory, make_key
from tiers.wrappers.guard import Guarded

AT_ONCE = object_upkeep.PACE._replace(beat=0.02, usual=Pause(0.02, 0), full=Pause(0.02, 0))
COUNT = 100


def fill_by_processes(
    settings: dict[str, Any], payload: int, number: int = 3, holder_dies: bool = False
) -> list[int]:
    """Fill an object tier by so many processes at once; how many blocks each has kept. The first,
    which does the upkeep, may be killed half way, and is left out then. The others stay until the
    last one has ended."""
    command = [sys.executable, "-m", "tests.support.filling", json.dumps(settings), str(payload)]
    with ExitStack() as stack:
        children: list[subprocess.Popen[bytes]] = []
        for _ in range(number):
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            children.append(stack.enter_context(child))
            stack.callback(child.kill)
            _expect(child, b"ready\n")
        for child in children:
            _tell(child)
        if holder_dies:
            _expect(children[0], b"half\n")
            children.pop(0).kill()
        for child in children:
            _expect(child, b"half\n")
        kept = [int(child.stdout.readline()) for child in children if child.stdout]
        for child in children:
            child.communicate(b"\n")
    return kept


def _expect(child: subprocess.Popen[bytes], line: bytes) -> None:
    assert child.stdout is not None
    assert (found := child.stdout.readline()) == line, found


def _tell(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    child.stdin.write(b"\n")
    child.stdin.flush()


def _put_many(settings: dict[str, Any], payload: int) -> None:
    object_upkeep.PACE = AT_ONCE
    opened, kept = ObjectSpec.model_validate(settings).open(StoreContext(payload)), 0
    while not opened._bucket._room.count.round:  # type: ignore[attr-defined]
        time.sleep(0.001)
    print("ready", flush=True)
    sys.stdin.readline()
    with closing(Guarded(opened, "object")) as store:
        for number in range(20 * COUNT):
            # More, where there was no room until another had taken a killed one's upkeep.
            if number >= COUNT and kept >= COUNT // 3:
                break
            kept += sum(store.put(Memory([make_key()], payload).fill().blocks))
            if number == COUNT // 2:
                print("half", flush=True)
            time.sleep(0.01)  # as an engine computes between two
        print(kept, flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    _put_many(json.loads(sys.argv[1]), int(sys.argv[2]))
