"""Python runs this first where its folder is on PYTHONPATH: threads begin late, and answer early.

What seldom happens, on a busy machine, happens in every run: a call waits before it begins, and
its thread after it has answered. A test that fails so shows a race, of ours or its own. Engines
and servers that a test begins inherit PYTHONPATH, and wait as well.
"""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future
from typing import Any

SHARE = 0.25
"""Of the calls, those that wait."""
LONGEST_S = 0.03

_random = random.Random()
_begin, _answer, _run = Future.set_running_or_notify_cancel, Future.set_result, threading.Thread.run


def _wait(share: float = SHARE) -> None:
    if _random.random() < share and threading.current_thread() is not threading.main_thread():
        time.sleep(_random.random() * LONGEST_S)


def _begin_late(self: Future[Any]) -> bool:
    _wait()
    return _begin(self)


def _answer_early(self: Future[Any], result: Any) -> None:
    _answer(self, result)
    _wait()


def _run_late(self: threading.Thread) -> None:
    _wait(1.0)
    _run(self)


Future.set_running_or_notify_cancel = _begin_late  # type: ignore[method-assign]
Future.set_result = _answer_early  # type: ignore[method-assign]
threading.Thread.run = _run_late  # type: ignore[method-assign]
