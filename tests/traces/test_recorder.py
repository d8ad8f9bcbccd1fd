"""The recorder: bounded, readable after a crash, and never in the way."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from spec.chain import MIN_BYTES, RecordSpec
from tests.disk.audit import run_mounted
from tests.support.clock import wait_for
from tiers.errors import RecordingError
from tiers.traces import recorder
from tiers.traces.open_trace import open_trace
from tiers.traces.recorded import FileHeader, encode_header, encode_request
from tiers.traces.recorder import EndedRequest, Recorder, Recording
from tiers.traces.recorder_files import RecordFolder
from tiers.traces.trace import TraceRequest

BLOCK = 16
_RANDOM = random.Random(0)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put is looked for at once."""
    monkeypatch.setattr(recorder, "POLL_SECONDS", 0.01)


def hashes(count: int) -> list[bytes]:
    return [_RANDOM.randbytes(32) for _ in range(count)]


def ended(blocks: int = 1, at: float = 0.0) -> EndedRequest:
    return EndedRequest(at, at, blocks * BLOCK, 0, hashes(blocks), "")


def recorder_of(path: Path, **more: object) -> Recorder:
    spec = RecordSpec.model_validate({"path": path, **more})
    return Recorder(Recording(spec, BLOCK, BLOCK, now=lambda: 0.0))


def read(path: Path) -> list[TraceRequest]:
    return list(open_trace(path))


def files(path: Path) -> list[Path]:
    return sorted(path.glob("*.zst"))


class Counts(dict[str, float]):
    """What a recorder has counted so far, each time this is called."""

    def __init__(self, one: Recorder) -> None:
        super().__init__(recorded_requests=0.0, record_dropped=0.0)
        self._one = one

    def __call__(self) -> tuple[float, float]:
        for name, count in self._one.take_counts().items():
            self[name] += count
        return self["recorded_requests"], self["record_dropped"]


def started(path: Path, **more: object) -> tuple[Recorder, Counts]:
    """A recorder that has written a request down."""
    one = recorder_of(path, **more)
    counts = Counts(one)
    one.put(ended())
    wait_for(lambda: counts() == (1, 0))
    return one, counts


def test_what_is_put_is_read(tmp_path: Path) -> None:
    one = recorder_of(tmp_path / "new" / "trace")
    shared = hashes(2)
    one.put(EndedRequest(0.001, 0.001, 40, 5, shared, ""))
    one.put(EndedRequest(0.002, 0.002, 50, 0, [*shared, *hashes(1)], ""))
    one.close()
    first, second = read(tmp_path / "new" / "trace")
    assert (first.timestamp, second.timestamp) == (0.0, 1.0)
    assert first.blocks == second.blocks[:2] and max(second.blocks) < 2**53
    assert one.take_counts() == {"recorded_requests": 2, "record_dropped": 0}
    assert one.take_counts() == {}


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        one = recorder_of(tmp_path / "trace")
        one.put(ended())
        one.close()
    finally:
        os.umask(before)
    assert (tmp_path / "trace").stat().st_mode & 0o777 == 0o700
    found = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "trace").iterdir()}
    assert len(found) == 3 and {*found.values()} == {0o600}


CHILD = """
import sys, time
from pathlib import Path
from tests.traces.test_recorder import ended, recorder_of
one = recorder_of(Path(sys.argv[1]))
while True:
    one.put(ended(20))
    time.sleep(0.002)
"""


def test_what_a_crash_leaves_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)])
    try:
        wait_for(lambda: sum(file.stat().st_size for file in files(path)) > 40_000)
        # Else the system may end a write of several pages early; a stop waits for its end.
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    trace = open_trace(path)
    assert len(list(trace)) > 100
    assert trace.summary.skipped == {}, "only whole frames are written"


def test_files_rotate_and_the_oldest_go(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    header = encode_header(FileHeader(BLOCK, 0.0))
    written = RecordFolder(path, MIN_BYTES, 86400.0, "me", lambda: header)
    written.open()
    strange = [path / "kvtiers-trace-notes.jsonl.zst", path / "other.jsonl.zst"]
    for file in strange:
        file.write_bytes(b"x" * MIN_BYTES)
    outside = tmp_path / "outside"
    outside.write_text("not ours")
    link = path / "kvtiers-trace-0000000000001-planted.jsonl.zst"
    link.symlink_to(outside)
    ids = [_RANDOM.getrandbits(53) for _ in range(50_000)]
    line = encode_request(TraceRequest(0.0, 50_000 * BLOCK, 0, ids))
    for _ in range(100):
        written.append(line)
    written.end()
    ours = [f for f in files(path) if f not in strange and not f.is_symlink()]
    sizes = [file.stat().st_size for file in ours]
    assert len(ours) >= 14 and max(sizes) <= MIN_BYTES // 16
    assert MIN_BYTES * 2 // 3 < sum(sizes) <= MIN_BYTES
    assert link.is_symlink() and outside.read_text() == "not ours"
    assert all(file.stat().st_size == MIN_BYTES for file in strange)
    assert [[*r.blocks] for r in open_trace(ours[-1])] == [ids, ids], "each can be read alone"
    with pytest.raises(RecordingError, match="are over a file's"):
        written.append(line * 3)


def test_many_writers_share_the_bound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace"
    dropped = []
    all_of_them = [recorder_of(path, max=MIN_BYTES) for _ in range(17)]
    for one in all_of_them:
        counts = Counts(one)
        one.put(ended())
        wait_for(lambda counts=counts: any(counts()))  # type: ignore[misc]
        dropped.append(counts["record_dropped"])
    assert dropped == [0] * 16 + [1]
    wait_for(lambda: caplog.text.count("record.max has room for 16") == 1)
    all_of_them[3].close()
    late = recorder_of(path, max=MIN_BYTES)
    late.put(ended())
    late.close()
    assert late.take_counts() == {"recorded_requests": 1, "record_dropped": 0}, (
        "the place of one that has ended"
    )
    for one in all_of_them:
        one.close()
    keys = {request.blocks[0] for file in files(path) for request in open_trace(file)}
    assert len(keys) == 16  # the first file went for the last one


def test_old_files_go_by_their_first_request(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    one = recorder_of(path)
    one.put(ended())
    one.close()
    (file,) = files(path)
    started = int(file.name.split("-")[2])
    old = file.rename(file.with_name(file.name.replace(str(started), str(started - 7 * 86400_000))))
    young = path / file.name.replace(str(started), str(started - 6 * 86400_000))
    young.write_bytes(old.read_bytes())
    again = recorder_of(path)
    again.put(ended())
    again.close()
    assert not old.exists() and young.exists() and len(files(path)) == 2


def test_a_file_is_ended_for_its_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiers.traces.recorder.TIDY_SECONDS", 0.0)
    path = tmp_path / "trace"
    one = recorder_of(path, keep="2s")  # so a file lasts for a quarter of a second
    one.put(ended())
    wait_for(lambda: len(files(path)) == 1)
    wait_for(lambda: not files(path))
    one.close()


def _give_away(path: Path) -> Path:
    os.chown(path, 12345, -1)
    return path


def _pipe(path: Path) -> Path:
    os.mkfifo(path, 0o600)
    return path


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (lambda path: path.write_text("a file"), "is no folder"),
        (lambda path: path.symlink_to(path.parent), "or a symbolic link"),
        (lambda path: (path.mkdir(), path.chmod(0o777)), "so others can write to it"),
        (lambda path: (path.mkdir(), _give_away(path)), "belongs to user 12345"),
        (
            lambda path: (path.mkdir(), (path / "kvtiers-trace.key").write_text("zz")),
            "so others can read it",
        ),
        (
            lambda path: (
                path.mkdir(),
                (path / "kvtiers-trace.key").touch(0o600),
            ),
            "is damaged",
        ),
        (
            lambda path: (path.mkdir(), (path / "kvtiers-trace.key").symlink_to("/dev/zero")),
            "symbolic links",
        ),
        (
            lambda path: (path.mkdir(), (path / "kvtiers-trace.lock").symlink_to("../planted")),
            "symbolic links",
        ),
        (lambda path: (path.mkdir(), _pipe(path / "kvtiers-trace.key")), "is no file"),
    ],
)
def test_what_is_not_written_to(
    tmp_path: Path,
    break_it: Callable[[Path], object],
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if os.geteuid() != 0 and "12345" in why:
        pytest.skip("only root gives folders away")
    path = tmp_path / "trace"
    break_it(path)
    with caplog.at_level(logging.WARNING):
        one = recorder_of(path)
        one.put(ended())
        one.put(ended())
        one.close()
    assert one.take_counts() == {"recorded_requests": 0, "record_dropped": 2}
    assert why in caplog.text and str(path) in caplog.text
    assert caplog.text.count("not recorded until this works") == 1
    assert not (tmp_path / "planted").exists()


FULL = """
import io, logging, subprocess, sys
from pathlib import Path
from tests.traces.test_recorder import Counts, ended, read, recorder_of, wait_for
from tiers.traces import recorder
recorder.RETRY_SECONDS = 0.1, 0.1
recorder.FLUSH_SECONDS = 0.0
said = io.StringIO()
logging.basicConfig(stream=said)
path = Path(sys.argv[1])
one = recorder_of(path / "trace")
counts = Counts(one)
for _ in range(60):
    one.put(ended(1000))
wait_for(lambda: counts()[1] > 0)
wait_for(lambda: "No space left" in said.getvalue())
(path / "hog").unlink()
before = counts["recorded_requests"]
def goes_on():
    one.put(ended(1000))
    return counts()[0] > before
wait_for(goes_on)
one.close(20)
assert len(read(path / "trace")) == counts()[0], (len(read(path / "trace")), counts)
subprocess.run(["mount", "-o", "remount,ro", path], check=True)
two = recorder_of(path / "trace")
two.put(ended())
two.close()
assert two.take_counts() == {"recorded_requests": 0, "record_dropped": 1}
assert "Read-only file system" in said.getvalue(), said.getvalue()
"""


def test_a_full_and_a_read_only_disk_cost_lines_and_what_was_written_is_read(
    tmp_path: Path,
) -> None:
    mount = f"mount -t tmpfs -o size=1100k tmpfs {tmp_path}"
    run_mounted(f"{mount} && head -c 1000000 /dev/zero > {tmp_path}/hog", FULL, tmp_path)


def test_half_a_write_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiers.traces.recorder.FLUSH_SECONDS", 0.0)
    monkeypatch.setattr("tiers.traces.recorder.RETRY_SECONDS", (0.01, 0.01))
    path = tmp_path / "trace"
    one, counts = started(path)
    real = os.write
    calls = 0

    def half(file: int, data: memoryview) -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            return real(file, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    one.put(ended(50))
    wait_for(lambda: counts()[1] == 1)
    monkeypatch.setattr(os, "write", real)

    def written() -> bool:
        one.put(ended())
        return counts()[0] > 1

    wait_for(written)
    one.close()
    trace = open_trace(path)
    assert len(list(trace)) == counts()[0]
    assert trace.summary.skipped == {}


def test_a_disk_that_hangs_costs_lines_and_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, hangs, real = threading.Event(), threading.Event(), os.write

    def hang(file: int, data: bytes) -> int:
        begun.set()
        hangs.wait(60)
        return real(file, data)

    monkeypatch.setattr(recorder, "MAX_REQUESTS", 10)
    one, counts = started(tmp_path / "trace")
    monkeypatch.setattr(os, "write", hang)
    one.put(ended(60_000))  # is flushed at once
    assert begun.wait(60)
    for _ in range(25):
        one.put(ended())
    assert counts()[1] == 15
    assert caplog.text.count("requests come faster than they are recorded") == 1
    one.close(0.05)  # returns, although the thread does not
    hangs.set()
    wait_for(lambda: counts()[0] == 12)
    assert len(read(tmp_path / "trace")) == 12


def test_blocks_that_wait_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_BLOCKS", 100)
    monkeypatch.setattr(recorder, "POLL_SECONDS", 3600)
    one = recorder_of(tmp_path / "trace")
    for _ in range(4):
        one.put(ended(60))
    one.close()
    assert one.take_counts() == {"recorded_requests": 2, "record_dropped": 2}


def test_a_fork_leaves_the_recording_to_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    one, counts = started(path)
    child = os.fork()
    if child == 0:
        try:
            one.put(ended(3))
            one.close(20)
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    one.put(ended(2))
    one.close()
    assert counts() == (2, 0)
    assert [len(request.blocks) for request in read(path)] == [1, 2]


def test_a_child_that_lives_on_keeps_no_file_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody could delete it."""
    one, _ = started(tmp_path / "trace", max=MIN_BYTES)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        one.close()
        (file,) = files(tmp_path / "trace")
        later = time.time() + 3600
        monkeypatch.setattr(time, "time", lambda: later)
        folder = RecordFolder(tmp_path / "trace", MIN_BYTES, 60.0)
        folder.open()
        folder.rotate()
        assert not file.exists()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_the_key_is_made_once(tmp_path: Path) -> None:
    some = [recorder_of(tmp_path / "trace") for _ in range(8)]
    same = ended()
    for one in some:
        one.put(same)
    for one in some:
        one.close()
    requests = read(tmp_path / "trace")
    assert len(requests) == 8 and len({tuple(request.blocks) for request in requests}) == 1


def test_lines_are_plain_json(tmp_path: Path) -> None:
    one = recorder_of(tmp_path / "trace")
    one.put(EndedRequest(1.5, 0.25, 33, 16, hashes(3), "salt"))
    one.close()
    (file,) = files(tmp_path / "trace")
    with zstandard.open(file, "rt", dctx=zstandard.ZstdDecompressor()) as lines:
        found = json.loads([*lines][1])
    assert (found["timestamp"], found["open_since"]) == (1500.0, 250.0)
    assert (len(found["hash_ids"]), len(found["answer_hash_ids"])) == (2, 1)
    assert len(found["salt"]) == 16
