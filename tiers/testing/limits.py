"""A test of the kit that doesn't end fails; the run goes on."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

from tiers.errors import KVTiersError
from tiers.testing.devices import WATCHES


class Endless(KVTiersError, AssertionError):
    """A call has not ended."""


def limited(test: Callable[[Any], None]) -> Callable[[Any], None]:
    """The test, which fails after the seconds that its class gives one."""

    @wraps(test)
    def run(kit: Any) -> None:
        within(kit.limit_seconds, lambda: test(kit))

    return run


def within(seconds: float, call: Callable[[], None]) -> None:
    """Call it on a thread of its own, and raise what it raises. Raises Endless, with the
    place where it is, if it has not returned after so many seconds; the thread is left behind."""
    raised: list[BaseException] = []
    watches: list[ExitStack] = []

    def body() -> None:
        WATCHES.set(watches)
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised where it was asked for
            raised.append(error)

    thread = threading.Thread(target=body, name="kit", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        while watches:  # nothing could be said while writes fail
            watches[-1].close()
        frame = sys._current_frames().get(thread.ident or 0)
        place = "".join(traceback.format_stack(frame)[-3:]) if frame else ""
        raise Endless(f"it has not ended after {seconds:g} s; it is at\n{place}")
    if raised:
        raise raised[0]
