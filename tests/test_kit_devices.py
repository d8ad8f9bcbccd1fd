"""Devices that the kit lets fail: an event loop's own sockets work on, and a hang ends it."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from tests.support.clock import wait_for
from tiers.testing.devices import failing_devices, failing_writes, open_files
from tiers.testing.limits import Endless, within


def test_an_event_loop_is_woken_while_devices_fail() -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    with failing_devices():
        done = asyncio.run_coroutine_threadsafe(asyncio.sleep(0, True), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    assert done


def test_writes_fail_whoever_makes_them(tmp_path: Path) -> None:
    """A store whose put hid such an error, of a file object, passed the kit."""
    file = tmp_path / "file"
    with failing_writes():
        with pytest.raises(OSError):
            file.write_bytes(b"lost")
        with pytest.raises(OSError), file.open("r+b") as opened:
            os.write(opened.fileno(), b"lost")
        assert file.read_bytes() == b""
    file.write_bytes(b"kept")
    assert file.read_bytes() == b"kept"


def test_devices_work_again_after_a_hang(tmp_path: Path) -> None:
    go = threading.Event()

    def hang() -> None:
        with failing_devices():
            go.wait()

    real = os.write
    with pytest.raises(Endless):
        within(0.2, hang)
    assert os.write is real
    (tmp_path / "file").write_text("written")
    go.set()


def test_a_hang_ends_nothing_of_another_thread() -> None:
    go = threading.Event()

    def hang() -> None:
        go.wait()

    with failing_devices():
        failing = os.write
        with pytest.raises(Endless):
            within(0.2, hang)
        assert os.write is failing
    go.set()


def test_a_thread_that_ends_while_files_are_counted_makes_them_no_fewer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ended(_: Path) -> bytes:
        raise ProcessLookupError

    monkeypatch.setattr(Path, "read_bytes", ended)
    wait_for(lambda: open_files() == len(os.listdir("/proc/self/fd")) > 0)  # others open some
