"""What a round spends its time on: looks at what all threads are doing, again and again."""

from __future__ import annotations

import linecache
import re
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

PAUSE = 0.0005
"""Seconds between two looks."""
SWITCH = 0.0001
"""Seconds after which Python code makes way for a look. C code that keeps the interpreter is seen
where it gives way, so short calls of it are counted too seldom."""

WAITING = "waiting"
KINDS = (
    ("checksum", re.compile(r"xxh|checksum|digest")),
    ("compression", re.compile(r"compress|zstd")),
    ("system call", re.compile(r"\bos\.\w+\(|fcntl\.|madvise|\.(send|recv|connect|settime)\w*\(")),
    ("index", re.compile(r"txn|cursor|_env\b|lmdb")),
    ("copy", re.compile(r"memmove|copy|\[[^\]]*:[^\]]*\] = |index_select|tobytes|b\"\"\.join")),
)
"""Kinds of work by what a line of code says, in this order; other work is Python of its file."""
_ASLEEP = ("/threading.py", "/queue.py", "/selectors.py", "/concurrent/futures/thread.py")


def stack(frame: FrameType, depth: int = 6) -> str:
    """Where a thread is, and who called it: a few frames, the innermost first."""
    found: list[str] = []
    at: FrameType | None = frame
    while at is not None and len(found) < depth:
        file = "/".join(at.f_code.co_filename.split("/")[-2:])
        found.append(f"{file}:{at.f_lineno} {at.f_code.co_name}")
        at = at.f_back
    return " < ".join(found)


class Sampler:
    """Counts, while it is open, what this process is busy with; or where one thread is.

    Each look is shared among the threads that work; where none does, it counts as waiting. So
    shares are of the time that passed. What other processes do is not seen.
    """

    def __init__(
        self, kind: Callable[[FrameType], str] | None = None, thread: int | None = None
    ) -> None:
        """`kind`: names what a thread does. `thread`: the identity of the only one looked at."""
        self._kind = kind or _kind
        self._only = thread
        self._looks: dict[str, float] = {}
        self._is_open = True
        self._switch = sys.getswitchinterval()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Sampler:
        sys.setswitchinterval(SWITCH)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_open = False
        self._thread.join()
        sys.setswitchinterval(self._switch)

    def shares(self) -> dict[str, float]:
        """What part of the time each kind of work took, the largest first."""
        total = sum(self._looks.values())
        found = sorted(self._looks.items(), key=lambda part: -part[1])
        return {kind: round(looks / total, 3) for kind, looks in found}

    def _run(self) -> None:
        me = threading.get_ident()
        while self._is_open:
            frames = [
                frame
                for ident, frame in sys._current_frames().items()
                if ident != me and self._only in (None, ident)
            ]
            seen = [kind for kind in map(self._kind, frames) if kind != WAITING] or [WAITING]
            for kind in seen:
                self._looks[kind] = self._looks.get(kind, 0.0) + 1 / len(seen)
            time.sleep(PAUSE)


def _kind(frame: FrameType) -> str:
    """What a thread is doing."""
    file = frame.f_code.co_filename
    if file.endswith(_ASLEEP):
        return WAITING
    # A thread that is entering a function stands on no line yet.
    line = linecache.getline(file, frame.f_lineno or 0)
    if "sleep(" in line:
        return WAITING
    for kind, pattern in KINDS:
        if pattern.search(line):
            return kind
    return f"Python in {'/'.join(file.rsplit('/', 2)[-2:])}"
