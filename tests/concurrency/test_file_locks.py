"""Locks on files that other processes wait for."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tiers.concurrency.file_locks import release, try_lock


def test_a_lock_that_is_released_is_free_though_a_child_has_its_file_open(tmp_path: Path) -> None:
    """A child that was forked in the moment in which the lock was held would keep it for life."""
    first, second = (os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT, 0o600) for _ in range(2))
    assert try_lock(first) and not try_lock(second)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        release(first)
        assert try_lock(second)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(second)
