"""A process at its limit, as in a container."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest


def refuse_threads(
    patch: pytest.MonkeyPatch, is_refused: Callable[[threading.Thread], bool] = lambda _: True
) -> None:
    """Let no more of these threads begin."""
    begin = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if is_refused(self):
            raise RuntimeError("can't start new thread")
        begin(self)

    patch.setattr(threading.Thread, "start", start)
