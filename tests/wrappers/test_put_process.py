"""Blocks that another process puts: what an engine sees of it, and when it can't be had."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import json
import logging
import math
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
from pydantic_core import PydanticSerializationError

from spec.offloading import EncryptionSpec, StoreSpec
from spec.registry import make_tier
from tests.support.plugin_packages import Install
from tests.support.puts_apart import (
    SITE,
    SIZE,
    in_the_engine,
    keys,
    number,
    opened,
    put,
    spec,
)
from tests.support.replay import ReplayEngine, answer
from tests.support.replay_chains import (
    MODEL,
    chain_of,
    cpu,
    disk,
    measured,
    scheduler_of,
    workload,
)
from tests.support.topologies import wait_until
from tiers.concurrency import beside
from tiers.concurrency.beside import send
from tiers.concurrency.executors import in_background
from tiers.connector.worker import checksums
from tiers.connector.worker.checksums import Checksums
from tiers.contract.stats import STATE, STATES
from tiers.disk.disk_store import DiskStore
from tiers.disk.spec import DiskSpec
from tiers.errors import RecordError, TierError, TierFull, TierNotOpen, TierUnavailable
from tiers.remote.object_spec import ObjectSpec
from tiers.store import (
    Block,
    GatheredBlock,
    Measured,
    Prefix,
    PutCounts,
    Recent,
    Resizable,
    Waiting,
    batch_blocks,
    capability,
    required,
)
from tiers.testing import GivenSpec, Memory, MemoryStore, make_key
from tiers.wrappers import put_process, put_server
from tiers.wrappers.opening import open_guarded
from tiers.wrappers.put_process import PutsApart

pytestmark = pytest.mark.long


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PutsApart]:
    made = opened(spec(tmp_path))
    yield made
    made.close()


def test_another_process_puts_what_this_one_finds(
    store: PutsApart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(store._inner), "put", None)
    some = keys(batch_blocks(SIZE))
    monkeypatch.setattr(put_process, "PART_BYTES", 3 * SIZE)
    assert put(store, some) == [True] * len(some)
    memory = Memory(some, SIZE)
    assert store.get(memory.blocks) == [True] * len(some)
    assert all(map(memory.holds, range(len(some))))
    assert store.counts() == PutCounts(0, 0)
    assert put(store, some[:4]) == [True] * 4
    assert store.counts() == PutCounts(renewed=4)
    assert number(store) != os.getpid()


TAKES = """
import select
from types import SimpleNamespace
from tiers.disk.disk_store import DiskStore
really = DiskStore.put
def put(store, blocks):
    return [block.key[16] != 1 for block, _ in zip(blocks, really(store, blocks))]
DiskStore.put = put
select.poll = lambda: SimpleNamespace(register=lambda *_: None, poll=lambda *_: TOGETHER)
serve("""


@pytest.mark.parametrize("how", ["in the engine", "part by part", "together"])
def test_the_first_block_of_a_batch_counts_as_used_last(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many of its parts have come when the process looks; and answers keep their order."""
    takes = TAKES.replace("TOGETHER", str(how == "together"))
    monkeypatch.setattr(beside, "_SERVE", beside._SERVE.replace("serve(", takes))
    monkeypatch.setattr(put_process, "PART_BYTES", 3 * SIZE)
    if how == "in the engine":
        no_program(monkeypatch)
    some = [bytes(16) + bytes([at]) + make_key() for at in range(8)]
    with closing(opened(spec(tmp_path))) as store:
        assert put(store, some) == [at != 1 or how == "in the engine" for at in range(8)]
        assert required(store, Recent).recent(bytes(16), 8).keys == some
        assert in_the_engine(store) == (how == "in the engine")


# -- it can't be had -------------------------------------------------------------------------


def no_program(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys, "executable", "/nowhere/python")


def ends_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys, "executable", shutil.which("false"))


def no_interpreter(patch: pytest.MonkeyPatch) -> None:
    """As Python has it within another program."""
    patch.setattr(sys, "executable", None)


def no_json(patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PydanticSerializationError("a plugin's setting is no JSON")

    patch.setattr(DiskSpec, "model_dump", refuse)


def other_modules(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(beside, "_SERVE", "import no_such_module")


def may_not_write(patch: pytest.MonkeyPatch) -> None:
    """As containers forbid it."""

    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, "its memory can't be written")

    patch.setattr(put_process._Process, "copy", refused)


@pytest.mark.fault
@pytest.mark.parametrize(
    "why", [no_program, no_interpreter, no_json, ends_at_once, other_modules, may_not_write]
)
def test_where_there_is_none_the_engine_puts(
    why: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    why(monkeypatch)
    store, some = opened(spec(tmp_path)), keys()
    for _ in range(2):
        assert put(store, some) == [True] * 3
    assert in_the_engine(store) and "since another can't" in store.puts_here
    assert store.has(some) == [True] * 3
    assert [line.levelname for line in caplog.records if "engine's" in line.message] == ["WARNING"]
    store.close()


FORBIDS = """
import ctypes, platform, struct
number = {"x86_64": 311, "aarch64": 271}[platform.machine()]
# Load the call's number; if it is this one end the process (or else refuse it); allow the others.
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, ACTION), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0, "no new privileges"
assert libc.prctl(22, 2, program, 0, 0) == 0, "a filter"

from tests.support.puts_apart import *
store = opened(spec(Path(PLACE)))
assert put(store, keys()) == [True] * 3
assert in_the_engine(store)
store.close()
print("goes on")
"""


@pytest.mark.fault
@pytest.mark.parametrize("action", ["0x80000000", "0x00050001"])
def test_where_the_system_forbids_the_call_the_engine_goes_on(action: str, tmp_path: Path) -> None:
    """A filter of calls may end who makes one: the process tries it on itself first."""
    engine = f"ACTION, PLACE = {action}, {str(tmp_path)!r}\n{FORBIDS}"
    ended = subprocess.run([sys.executable, "-c", engine], capture_output=True, text=True)
    assert ended.stdout == "goes on\n", ended.stderr


CLOSED = """
import os
from tests.support.puts_apart import *
of = spec(Path(PLACE))
made = of.open(SITE)
os.close(0), os.close(1)
store = PutsApart(made, of, SITE, "tier")
wait_until(lambda: store._process is None or store._process.has_answered())
assert put(store, keys()) == [True] * 3
assert not in_the_engine(store)
store.close()
"""


def test_an_engine_without_standard_streams_has_one(tmp_path: Path) -> None:
    """What is opened then has their numbers."""
    engine = f"PLACE = {str(tmp_path)!r}\n{CLOSED}"
    subprocess.run([sys.executable, "-c", engine], check=True)


def test_settings_that_hold_an_object_stay_in_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    given = GivenSpec(type="given", name="store").over(MemoryStore())
    store, some = opened(given), keys()
    assert put(store, some) == [True] * 3
    assert in_the_engine(store)
    assert "handed over" in caplog.text
    store.close()


def test_until_it_is_open_the_engine_puts(
    store: PutsApart, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also while the store hangs as it opens there, as one line says."""
    with monkeypatch.context() as patch:
        patch.setattr(put_process._Process, "has_answered", lambda *_: False)
        patch.setattr(put_process._Process, "put", None)
        assert put(store, keys()) == [True] * 3
        assert not caplog.messages
        patch.setattr(put_process, "OPEN_SECONDS", 0.0)
        for _ in range(2):
            assert put(store, keys()) == [True] * 3
    assert ["has not opened it after" in line for line in caplog.messages] == [True]
    assert "has not opened it after" in store.puts_here
    monkeypatch.setattr(type(store._inner), "put", None)
    assert put(store, keys()) == [True] * 3
    assert not store.puts_here


TRIES_OFTEN = """
from tiers.disk.folder import folder
from tiers.wrappers import put_server
folder.LOCK_SECONDS = put_server.RETRY_AFTER = 0.1
really = put_server.open_unguarded
def noted(*of):
    with open(NOTES, "a") as notes:
        notes.write("tried")
    return really(*of)
put_server.open_unguarded = noted
serve("""


@pytest.mark.fault
@pytest.mark.parametrize("opens", [True, False])
def test_a_folder_whose_lock_another_process_has_is_tried_again(
    opens: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that stands still, or many that start at once; and no close waits for that."""
    of, notes = spec(tmp_path), tmp_path / "notes"
    notes.touch()
    tries = TRIES_OFTEN.replace("NOTES", repr(str(notes)))
    monkeypatch.setattr(beside, "_SERVE", beside._SERVE.replace("serve(", tries))
    made = of.open(SITE)
    lock = os.open(of.path / "lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    store = PutsApart(made, of, SITE, "tier")
    process = store._process
    assert process is not None
    wait_until(lambda: notes.read_text().count("tried") > 2 or process.has_answered())
    assert not process.has_answered(), "it tries once"
    if opens:
        os.close(lock)
        assert process.has_answered(30)
        monkeypatch.setattr(type(made), "put", None)
        assert put(store, keys()) == [True] * 3
    began = time.monotonic()
    store.close()
    assert time.monotonic() < began + beside.CLOSE_SECONDS / 2
    if not opens:
        os.close(lock)


OPENS_LATER = """
from tiers.disk.spec import DiskSpec
from tiers.errors import TierUnavailable
from tiers.wrappers import put_server
put_server.RETRY_AFTER = 0.1
really, tries = DiskSpec.open, []
def late(spec, site):
    tries.append(site)
    if len(tries) < 3:
        raise NAME("for now")
    return really(spec, site)
DiskSpec.open = late
serve("""


@pytest.mark.parametrize("name", ["TierUnavailable", "OSError"])
def test_what_can_not_be_opened_for_now_is_tried_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the engine: else it would put the blocks itself from then on."""
    late = OPENS_LATER.replace("NAME", name)
    monkeypatch.setattr(beside, "_SERVE", beside._SERVE.replace("serve(", late))
    with closing(opened(spec(tmp_path))) as store:
        monkeypatch.setattr(type(store._inner), "put", None)
        assert put(store, keys()) == [True] * 3
        assert not in_the_engine(store)


def test_it_tries_less_and_less_often_to_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the engine does; and ends with the engine."""
    waits: list[float] = []

    def down(*_: object) -> None:
        raise OSError("for now")

    def poll(milliseconds: float) -> bool:
        waits.append(milliseconds / 1000)
        return len(waits) == 7

    monkeypatch.setattr(put_server, "open_unguarded", down)
    engine, theirs = socket.socketpair()
    with engine, theirs, ExitStack() as stack, pytest.raises(OSError, match="for now"):
        server = put_server._Server(theirs, stack)
        stack.callback(logging.getLogger().removeHandler, server._lines)
        server._arrivals = cast(Any, SimpleNamespace(poll=poll))
        settings = DiskSpec(path=Path("/kv"), capacity=1 << 20).model_dump(mode="json")
        place = {"payload_bytes": SIZE, "num_ranks": 1}
        server._open({"settings": settings, "key_mark": "", "site": place, "level": 20})
    assert waits == [1, 2, 4, 8, 16, 30, 30]


# -- it can be had, wherever the engine runs -------------------------------------------------


def odd_path(patch: pytest.MonkeyPatch, place: Path) -> None:
    patch.syspath_prepend(place)
    patch.setattr(sys, "path", [place, *sys.path])


def odd_folder(patch: pytest.MonkeyPatch, place: Path) -> None:
    """What lies there is not run: others may write there."""
    for name in ("json", "struct", "tiers"):
        (place / f"{name}.py").write_text("raise SystemExit('this is not ours')")
    patch.chdir(place)


def many_files(patch: pytest.MonkeyPatch, place: Path) -> None:
    """More than `select` can take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2000)), hard))
    for one in range(1100):
        patch.setattr(sys, f"file_{one}", (place / "file").open("w"), raising=False)


@pytest.mark.parametrize("how", [odd_path, odd_folder, many_files])
def test_wherever_the_engine_runs_another_process_puts(
    how: Callable[[pytest.MonkeyPatch, Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with monkeypatch.context() as patch:
        how(patch, place)
        store = opened(spec(tmp_path))
        for _ in range(2):
            assert put(store, keys()) == [True] * 3
        assert not in_the_engine(store)
        store.close()


# -- it ends ---------------------------------------------------------------------------------


@pytest.mark.fault
def test_one_that_is_killed_costs_a_put(store: PutsApart) -> None:
    some = keys()
    assert put(store, some) == put(store, some) == [True] * 3
    first = number(store)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(TierUnavailable, match="signal 9"):
        put(store, keys())
    more = keys()
    assert put(store, more) == [True] * 3
    assert number(store) != first
    assert store.has(some + more) == [True] * 6
    assert store.counts() == PutCounts(renewed=3), "a count has fallen"


@pytest.mark.fault
def test_counts_stay_while_one_is_lost(store: PutsApart) -> None:
    """Whoever asks meanwhile: they would fall and come back, or a process count twice."""
    some, seen = keys(), list[PutCounts]()
    assert put(store, some) == put(store, some) == [True] * 3
    os.kill(number(store), signal.SIGKILL)

    def look(frame: FrameType, *_: object) -> Any:
        """Ask at each line."""
        if frame.f_code is not PutsApart._lose.__code__:
            return None
        seen.append(store.counts())
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        with pytest.raises(TierUnavailable, match="signal 9"):
            put(store, keys())
    finally:
        sys.settrace(before)
    assert len(seen) > 3 and set(seen) == {PutCounts(renewed=3)}


@pytest.mark.fault
def test_one_that_begins_while_keys_rotate_has_the_engine_s(tmp_path: Path) -> None:
    """Under the new key nobody would find what it puts before the engine restarts."""
    file, old, new = tmp_path / "keys", "ab" * 32, "cd" * 32
    file.write_text(old)
    encrypted = spec(tmp_path).model_copy(update={"encryption": EncryptionSpec(key_file=file)})
    with closing(open_guarded(encrypted, SITE, puts_apart=True)) as guarded:
        store = guarded.now()
        assert isinstance(store, PutsApart)
        for lines in (f"{new}\n{old}", new):
            wait_until(lambda: store._process is None or store._process.has_answered())
            some = keys()
            assert put(store, some) == [True] * 3
            file.write_text(lines)
            os.kill(number(store), signal.SIGKILL)
            with pytest.raises(TierUnavailable, match="is gone"):
                put(store, keys())
            assert store.has(some) == [True] * 3
        with pytest.raises(TierUnavailable, match="has not the key that this engine began with"):
            put(store, keys())


@pytest.mark.fault
@pytest.mark.parametrize("count", [1, 20_000], ids=["and hears nothing", "and its socket is full"])
def test_a_put_that_hangs_ends_with_its_process(count: int, store: PutsApart) -> None:
    """After its deadline, and another is begun."""
    put(store, keys())
    process, of_prompt = number(store), Prefix(keys(count), 0, 8)
    os.kill(process, signal.SIGSTOP)
    (block,) = Memory(keys(1), SIZE).fill().readonly()

    def hang() -> None:
        with Waiting(lambda: 0.1), pytest.raises(TierUnavailable, match="not answered in time"):
            store.put([GatheredBlock(*block, None, of_prompt)])

    hanging = in_background(hang, "put")
    try:
        hanging.result(30)
        assert not is_there(process)
    finally:
        os.kill(process, signal.SIGKILL) if is_there(process) else None
    assert put(store, keys()) == [True] * 3


@pytest.mark.fault
def test_while_one_can_not_be_ended_no_other_begins(
    store: PutsApart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a device that hangs. Each trial of the guard would begin one more."""
    put(store, keys())
    process = number(store)
    os.kill(process, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "kill", lambda _: None)
        patch.setattr(beside, "KILL_SECONDS", 0)
        for why in ("not answered in time", *[f"{process} can't be ended"] * 2):
            with Waiting(lambda: 0.1), pytest.raises(TierUnavailable, match=why):
                put(store, keys())
    os.kill(process, signal.SIGKILL)
    wait_until(lambda: store._before is None or store._before._process.poll() is not None)
    assert put(store, keys()) == [True] * 3


@pytest.mark.fault
def test_one_that_opens_for_long_fails_puts_and_goes_on(
    store: PutsApart, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were it ended, too, a store that opens for longer than a put may take would never open."""
    put(store, keys())
    os.kill(number(store), signal.SIGKILL)
    with pytest.raises(TierUnavailable, match="signal 9"):
        put(store, keys())
    late = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'now')!r}): time.sleep(0.01)"
    monkeypatch.setattr(beside, "_SERVE", beside._SERVE.replace("serve(", f"{late}\nserve("))
    numbers = set[int]()
    for _ in range(2):
        with Waiting(lambda: 0.1), pytest.raises(TierUnavailable, match="yet to open"):
            put(store, keys())
        numbers.add(number(store))
    (tmp_path / "now").touch()
    assert put(store, keys()) == [True] * 3
    assert {number(store)} == numbers


@pytest.mark.fault
def test_what_it_puts_is_its_own(store: PutsApart) -> None:
    """The engine's memory has another block once a put has ended, though its process lives on."""
    put(store, keys())
    process, some = number(store), keys()
    os.kill(process, signal.SIGSTOP)
    assert store._process is not None
    engine, unread, memory = store._process._socket, array("i", [0]), Memory(some, SIZE).fill()
    putting = in_background(lambda: store.put(memory.readonly()), "put")

    def is_told() -> bool:
        fcntl.ioctl(engine, termios.TIOCOUTQ, unread)
        return unread[0] > 0

    wait_until(is_told)
    for block in memory.blocks:
        block.payload[:] = bytes(SIZE)
    os.kill(process, signal.SIGCONT)
    assert putting.result(30) == [True] * 3
    stored = Memory(some, SIZE)
    assert store.get(stored.blocks) == [True] * 3
    assert all(map(stored.holds, range(3)))


def test_one_that_talks_nonsense_does_not_live_on(
    store: PutsApart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next answer would be taken for that of another put."""
    put(store, keys())
    for nonsense in (b"no JSON", b"[]", b"{}", b'{"logs": []}'):
        process, said = number(store), partial(json.loads, nonsense)
        with monkeypatch.context() as patch, pytest.raises(TierUnavailable, match="is gone"):
            patch.setattr(beside, "receive", lambda *_, said=said: said())
            put(store, keys())
        assert not is_there(process)
        assert put(store, keys()) == [True] * 3


@pytest.mark.fault
@pytest.mark.parametrize("why", [no_program, ends_at_once])
def test_one_that_can_not_be_begun_again_is_a_failure(
    why: Callable[[pytest.MonkeyPatch], None],
    store: PutsApart,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What the engine's process never did it does not begin to do in the midst of traffic; the
    guard, which is told, pauses between tries, and logs what it is told."""
    put(store, keys())
    os.kill(number(store), signal.SIGKILL)
    why(monkeypatch)
    for _ in range(3):
        with pytest.raises(TierUnavailable):
            put(store, keys())
    assert not [line for line in caplog.records if line.levelno >= logging.WARNING]
    monkeypatch.undo()
    assert put(store, keys()) == [True] * 3


@pytest.mark.fault
def test_the_number_of_one_that_has_ended_is_not_used(
    store: PutsApart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody has to wait for children, another process may have it, and its memory."""
    put(store, keys())
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        os.kill(number(store), signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{number(store)}").exists())
        asked = list[object]()
        with monkeypatch.context() as patch, pytest.raises(TierUnavailable):
            patch.setattr(ctypes, "CDLL", lambda *library, **_: asked.append(library))
            put(store, keys())
        assert not asked, "it is written to"
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_store_that_is_closed_begins_no_other(tmp_path: Path) -> None:
    """A put may be in flight while its tier is taken from the chain."""
    store = opened(spec(tmp_path))
    put(store, keys())
    process = number(store)
    store.close()
    for _ in range(3):
        with pytest.raises(TierUnavailable):
            put(store, keys())
        assert store._process is None or number(store) == process


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "while it begins"])
def test_it_ends_with_a_store_that_is_closed(
    is_open: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills: list[object] = []
    monkeypatch.setattr(put_process._Process, "kill", kills.append)
    of = spec(tmp_path)
    store = opened(of) if is_open else PutsApart(of.open(SITE), of, SITE, "tier")
    if is_open:
        put(store, keys())
    process = number(store)
    store.close()
    assert not is_there(process) and not kills
    again = of.open(SITE)
    assert again.put(Memory(keys(), SIZE).fill().readonly()) == [True] * 3, "the folder is whole"
    again.close()


SOON = """from tiers.concurrency import beside
beside.LOOKED_EVERY_S = beside.CLOSE_SECONDS = 0.1
serve("""
HANGS = """import time
from tiers.disk.disk_store import DiskStore
def put(store, _):
    store._folder.path.with_name("begun").touch()
    time.sleep(1000)
DiskStore.put = put
serve("""
PUTS = """
threading.Thread(target=put, args=(store, keys())).start()
wait_until((place / "begun").exists)
"""
FORKS = """
if not (forked := os.fork()):
    os.close(1)
    time.sleep(1000)
"""


@pytest.mark.fault
@pytest.mark.parametrize(
    ("there", "here"),
    [
        pytest.param("serve(", "", id="alone"),
        pytest.param("serve(", FORKS, id="while another has its end of the socket"),
        pytest.param(HANGS, PUTS, id="while a put hangs"),
    ],
)
def test_it_ends_with_an_engine_that_is_killed(there: str, here: str, tmp_path: Path) -> None:
    engine = f"""
import os, threading, time
from tests.support.puts_apart import *
from tiers.concurrency import beside
beside._SERVE = beside._SERVE.replace("serve(", {SOON!r}).replace("serve(", {there!r})
place, forked = Path({str(tmp_path)!r}), 0
store = opened(spec(place))
{here}
print(number(store), forked, flush=True)
time.sleep(1000)
"""
    running = subprocess.Popen([sys.executable, "-c", engine], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    process, forked = map(int, running.stdout.readline().split())
    assert is_there(process)
    running.kill()
    running.communicate()
    wait_until(lambda: not is_there(process))
    if forked:
        os.kill(forked, signal.SIGKILL)


LEAVES_ANOTHER = """
import os, subprocess
from tiers.disk.disk_store import DiskStore
def put(store, _):
    there = subprocess.Popen(["sleep", "60"], close_fds=False)
    (store._folder.path.parent / "number").write_text(str(there.pid))
    os._exit(3)
DiskStore.put = put
serve("""


@pytest.mark.fault
def test_a_forked_child_that_ends_leaves_it_to_its_parent(store: PutsApart) -> None:
    put(store, keys())
    process = number(store)
    child = os.fork()
    if not child:
        try:
            store.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert put(store, keys()) == [True] * 3
    assert number(store) == process


@pytest.mark.fault
def test_what_it_had_started_does_not_stand_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched = beside._SERVE.replace("serve(", LEAVES_ANOTHER)
    monkeypatch.setattr(beside, "_SERVE", patched)
    store = opened(spec(tmp_path))
    with pytest.raises(TierUnavailable, match="it ended with 3"):
        put(store, keys())
    there = int((tmp_path / "number").read_text())
    assert is_there(there), "its end was waited for"
    os.kill(there, signal.SIGKILL)
    store.close()


@pytest.mark.fault
def test_one_that_hangs_keeps_no_store_from_closing(
    store: PutsApart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine waits a second for a tier of which a put hangs; its folder is to be whole."""
    monkeypatch.setattr(beside, "CLOSE_SECONDS", 1000)
    put(store, keys())
    process, is_closed = number(store), threading.Event()
    monkeypatch.setattr(store._inner, "close", is_closed.set)
    os.kill(process, signal.SIGSTOP)
    closing = in_background(store.close, "close")
    try:
        assert is_closed.wait(30)
    finally:
        os.kill(process, signal.SIGKILL)
    closing.result(30)


def test_one_that_is_stopped_in_the_midst_of_a_message_reads_the_rest(store: PutsApart) -> None:
    """As a debugger does with it."""
    put(store, keys())
    assert store._process is not None
    engine, first = store._process._socket, keys(1000)
    message = json.dumps({"put": [], "prompts": [key.hex() for key in first], "until": math.inf})
    engine.sendall(len(message).to_bytes(8, "little") + message[:1000].encode())
    unread = array("i", [1])

    def has_read() -> bool:
        fcntl.ioctl(engine, termios.TIOCOUTQ, unread)
        return not unread[0]

    wait_until(has_read)
    os.kill(number(store), signal.SIGSTOP)
    os.kill(number(store), signal.SIGCONT)
    engine.sendall(message[1000:].encode())
    assert "logs" in beside.receive(engine)


@pytest.mark.fault
def test_who_ends_all_processes_leaves_it_to_the_engine(store: PutsApart) -> None:
    """As systemd does: an engine has blocks to store still, and ends it by itself."""
    put(store, keys())
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(number(store), name)
        assert put(store, keys()) == [True] * 3


def is_there(process: int) -> bool:
    """Whether it runs; one that has ended may wait for its parent still."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# -- what it is told, and what it says -------------------------------------------------------


def test_a_new_capacity_outlives_the_process(store: PutsApart, tmp_path: Path) -> None:
    put(store, keys())
    more = spec(tmp_path, 400).capacity
    resizable = capability(store, Resizable)
    assert resizable is not None
    resizable.resize(more)
    os.kill(number(store), signal.SIGKILL)
    with pytest.raises(TierUnavailable):
        put(store, keys())
    put(store, keys())
    assert required(store, Measured).usage().capacity == more


def test_a_new_capacity_outlives_a_process_that_has_yet_to_open(tmp_path: Path) -> None:
    of = spec(tmp_path)
    store = PutsApart(of.open(SITE), of, SITE, "tier")
    store.resize(of.capacity // 2)
    wait_until(lambda: store._process is None or store._process.has_answered())
    assert put(store, keys()) == [True] * 3 and not in_the_engine(store)
    assert required(store, Measured).usage().capacity == of.capacity // 2
    store.close()


SAYS_SO = """
import logging
from tiers.disk.disk_store import DiskStore
from tiers import errors
from tiers.store import time_left
def put(store, blocks):
    logging.getLogger("tiers.there").warning("%g s are left", round(time_left()))
    raise errors.NAME("no room")
DiskStore.put = put
serve("""


@pytest.mark.parametrize("error", [TierFull, TierNotOpen])
def test_it_knows_the_time_left_and_the_engine_logs_what_it_says(
    error: type[TierError],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The kind of an error stays: one has the guard open the store again."""
    says_so = SAYS_SO.replace("NAME", error.__name__)
    monkeypatch.setattr(beside, "_SERVE", beside._SERVE.replace("serve(", says_so))
    monkeypatch.setattr(put_process, "PART_BYTES", SIZE)
    store = opened(spec(tmp_path))
    with Waiting(lambda: 5.2), pytest.raises(error, match="no room"):
        put(store, keys())
    said = [line for line in caplog.records if line.name == "tiers.there"]
    assert {(line.levelname, line.message) for line in said} == {("WARNING", "5 s are left")}
    store.close()


ANSWERS_NUMBERS = """
from tiers.disk.disk_store import DiskStore
really, seen = DiskStore.put, []
def put(store, blocks):
    seen.extend(blocks)
    held = really(store, blocks)
    return [1] * len(held) if len(seen) <= 3 else held
DiskStore.put = put
serve("""


def test_a_put_is_told_its_own_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one that failed the next would hear what is left, return before its blocks are put, and
    the one behind it would overwrite them."""
    patched = beside._SERVE.replace("serve(", ANSWERS_NUMBERS)
    monkeypatch.setattr(beside, "_SERVE", patched)
    monkeypatch.setattr(put_process, "PART_BYTES", SIZE)
    store = opened(spec(tmp_path))
    with pytest.raises(TierError, match="where a boolean belongs"):
        put(store, keys())
    assert put(store, keys()) == [True] * 3
    store.close()


WARNS = """
from tiers.disk.disk_store import DiskStore
def warning(store):
    SAYS
DiskStore.warning = warning
serve("""


@pytest.mark.parametrize(
    ("says", "told"), [("return 'there'", "there"), ("return 7", "7"), ("raise OSError()", "")]
)
def test_what_it_warns_of_is_what_the_store_that_puts_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, told: str
) -> None:
    """What another warned of that put before it is over. And one that can't tell has put."""
    warns = WARNS.replace("SAYS", says)
    monkeypatch.setattr(beside, "_SERVE", beside._SERVE.replace("serve(", warns))
    monkeypatch.setattr(DiskStore, "warning", lambda _: "here")
    with closing(opened(spec(tmp_path))) as store:
        assert store.warning() == "here"
        assert put(store, keys()) == [True] * 3 and not in_the_engine(store)
        assert store.warning() == told


class TakenBack(Block):
    """As vLLM takes back a row that was to be stored."""

    @property
    def checksum(self) -> bytes:
        raise RecordError("vLLM has taken the row back")

    def readonly(self) -> TakenBack:
        return self


def test_a_block_that_is_taken_back_costs_no_process(
    store: PutsApart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is copied before its checksum is computed: one that was its own then is so after that."""
    monkeypatch.setattr(put_process, "PART_BYTES", SIZE)
    put(store, keys())
    process = number(store)
    first, second, third = Memory(keys(), SIZE).fill().readonly()
    assert store.put([first, TakenBack(*second), third]) == [True, False, True]
    with pytest.raises(RecordError, match="taken the row back"):
        store.put([TakenBack(*second)])
    assert number(store) == process
    assert put(store, keys()) == [True] * 3
    assert store.has([first.key, second.key, third.key]) == [True, False, True]


SAYS_MUCH = """
import logging
from tiers.disk.disk_store import DiskStore
really = DiskStore.put
def put(store, blocks):
    for number in range(1000):
        logging.getLogger("tiers.there").warning("%d of many, by %s", number, "x" * 1000)
    return really(store, blocks)
DiskStore.put = put
serve("""


def test_what_it_logs_holds_up_no_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While it says more than its socket takes the engine sends what its socket does not take."""
    monkeypatch.setattr(beside, "_SERVE", beside._SERVE.replace("serve(", SAYS_MUCH))
    monkeypatch.setattr(put_process, "PART_BYTES", SIZE)
    store, some = opened(spec(tmp_path)), keys(16)
    blocks = Memory(some, SIZE).fill().readonly()
    of_prompt = [GatheredBlock(*block, None, Prefix(keys(1000), 0, 8)) for block in blocks]
    putting = in_background(lambda: store.put(of_prompt), "put")
    try:
        assert putting.result(30) == [True] * 16
    finally:
        os.kill(number(store), signal.SIGKILL)
    assert "999 of many" in caplog.text
    store.close()


LOGS_BADLY = """
import logging
from tiers.disk.disk_store import DiskStore
really = DiskStore.put
def put(store, blocks):
    logging.getLogger("tiers.there").warning("%d blocks", "some")
    return really(store, blocks)
DiskStore.put = put
serve("""


def test_a_line_that_can_not_be_made_fails_no_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it in the engine's process."""
    monkeypatch.setattr(beside, "_SERVE", beside._SERVE.replace("serve(", LOGS_BADLY))
    store = opened(spec(tmp_path))
    assert put(store, keys()) == [True] * 3
    store.close()


def test_blocks_of_a_prompt_are_kept_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And put from the first on: a group before one that is there is taken for whole."""
    pytest.importorskip("obstore")
    store = opened(ObjectSpec.model_validate({"type": "object", "url": f"file://{tmp_path}/kv"}))
    some = [bytes(16) + key for key in keys(8)]
    blocks = Memory(some, SIZE).fill().readonly()
    packed = [GatheredBlock(*block, None, Prefix(some, at, 8)) for at, block in enumerate(blocks)]
    assert store.put(packed) == [True] * 8
    assert sum(path.is_file() for path in (tmp_path / "kv").rglob("*")) == 1
    firsts, really = list[int](), put_process._Process._hand_over

    def note(process: Any, part: Sequence[Block], first: int, is_last: bool) -> RecordError | None:
        firsts.append(first)
        return really(process, part, first, is_last)

    monkeypatch.setattr(put_process._Process, "_hand_over", note)
    monkeypatch.setattr(put_process, "PART_BYTES", 3 * SIZE)
    store.put(packed)
    store.close()
    assert firsts == [0, 3, 6]


def test_what_was_sent_before_the_end_is_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier is closed, as when its folder has gone, while blocks are put into it."""
    store, key = MemoryStore(), make_key()
    monkeypatch.setattr(put_server, "open_unguarded", lambda *_: store)
    engine, theirs = socket.socketpair()
    settings = DiskSpec(path=Path("/kv"), capacity=1 << 20).model_dump(mode="json")
    place = {"payload_bytes": SIZE, "num_ranks": 1}
    with engine, theirs, ExitStack() as stack, pytest.raises(EOFError):
        send(engine, {"settings": settings, "key_mark": "", "site": place, "level": 20})
        part = {"put": [(key.hex(), None, None)], "first": 0, "prompts": [], "is_last": False}
        send(engine, part | {"until": math.inf})
        engine.shutdown(socket.SHUT_WR)
        put_server._Server(theirs, stack).run()
    assert store.has([key]) == [True]


PLUGIN = """
from typing import Literal
from spec.offloading import StoreContext
from tiers.disk.spec import DiskSpec

class OwnSpec(DiskSpec):
    type: Literal["own"] = "own"

    def open(self, site: StoreContext):
        return super().open(site)
"""


def test_blocks_are_put_as_they_are_looked_for(plugin: Install, tmp_path: Path) -> None:
    """In records, since the store is a plugin's."""
    plugin("own_disk", PLUGIN, own="OwnSpec")
    settings: dict[object, object] = {
        "type": "own",
        "path": tmp_path / "kv",
        "capacity": 200 * (SIZE + 4096),
    }
    own, some = cast(StoreSpec, make_tier("own", settings)), keys()
    with closing(open_guarded(own, SITE, puts_apart=True)) as guarded:
        store = guarded.now()
        assert isinstance(store, PutsApart)
        wait_until(lambda: store._process is None or store._process.has_answered())
        assert put(store, some) == [True] * 3
        assert not in_the_engine(store)
        memory = Memory(some, SIZE)
        assert store.get(memory.blocks) == [True] * 3


# -- in an engine ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["always", "never", "auto"])
def test_an_engine_loads_what_another_process_stored(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU its own stores blocks, unless it is told otherwise."""
    here = list[int]()
    really = DiskStore.put

    def count(store: DiskStore, blocks: Sequence[Block]) -> list[bool]:
        here.append(len(blocks))
        return really(store, blocks)

    monkeypatch.setattr(DiskStore, "put", count)
    monkeypatch.setattr(
        put_process._Process, "has_answered", lambda *_: True
    )  # else some are put here
    tier = disk(tmp_path / "kv", "4MiB", store_process=how, deadline="60s")
    chain = chain_of(cpu(12), tier)
    engine = ReplayEngine(chain, MODEL, num_blocks=20, batch_tokens=64)
    for prompt, max_tokens in workload(seed=3):
        request = engine.add(prompt, max_tokens)
        engine.run()
        engine.settle()
        assert request.output == answer(MODEL, prompt, max_tokens)
    assert measured(engine, "stored_blocks", "disk") > 0 < measured(engine, "loaded_tokens", "disk")
    assert measured(engine, "store_failures", "disk") == 0
    assert bool(here) == (how != "always")
    worker: Any = engine.workers[0]
    digests = worker.connector.children[1]._host.checksums._process
    assert (digests is None) == (how != "always"), "another computes checksums where another puts"
    engine.close()


def shown(engine: ReplayEngine) -> tuple[str, float]:
    """What its metrics say of the disk: its state, and whether writes are up."""
    return STATES[int(measured(engine, STATE, "disk"))], measured(engine, "writes_up", "disk")


def asker(engine: ReplayEngine) -> Callable[[Callable[[], bool]], None]:
    """Asks for one prompt after another, all of which it answers rightly, until something is so."""
    asked = itertools.count()

    def ask_until(is_over: Callable[[], bool]) -> None:
        until = time.monotonic() + 60
        while not is_over():
            assert time.monotonic() < until, "it never is"
            prompt = [next(asked)] * 40
            assert engine.generate(prompt, 2).output == answer(MODEL, prompt, 2)

    return ask_until


@pytest.mark.fault
def test_metrics_say_that_the_engine_puts_what_a_process_was_to_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_program(monkeypatch)
    tiers = cpu(12), disk(tmp_path / "kv", store_process="always")
    with closing(ReplayEngine(chain_of(*tiers), MODEL, num_blocks=20)) as engine:
        engine.generate([1] * 40, 2)
        engine.settle()
        assert shown(engine) == ("degraded", 1)
        state, why = scheduler_of(engine, 1).condition()
        assert state == "degraded" and "stored by the engine's process" in why
        assert measured(engine, "stored_blocks", "disk") > 0


@pytest.mark.fault
def test_metrics_say_that_a_put_hangs_until_another_process_puts(tmp_path: Path) -> None:
    """Meanwhile answers are right, and the other tier stores all."""
    tiers = cpu(400), disk(tmp_path / "kv", "4MiB", store_process="always", deadline="1s")
    with closing(ReplayEngine(chain_of(*tiers), MODEL, num_blocks=40)) as engine:
        ask_until = asker(engine)
        worker: Any = engine.workers[0]
        store: PutsApart = worker.connector.children[1]._store.now()
        wait_until(lambda: store._process is None or store._process.has_answered())
        ask_until(lambda: measured(engine, "stored_blocks", "disk") > 0)
        ask_until(lambda: shown(engine) == ("open", 1))
        os.kill(number(store), signal.SIGSTOP)
        ask_until(lambda: shown(engine) == ("degraded", 0))
        ask_until(lambda: shown(engine) == ("open", 1))
        assert measured(engine, "store_failures", "disk") > 0
        assert measured(engine, "tier_failures", "disk") > 0
        assert measured(engine, "store_failures", "cpu") == 0
        before = measured(engine, "stored_blocks", "disk")
        ask_until(lambda: measured(engine, "stored_blocks", "disk") > before)


@pytest.mark.fault
def test_metrics_say_that_the_engine_computes_checksums_until_another_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "AGAIN_SECONDS", 1.0)
    tiers = cpu(400), disk(tmp_path / "kv", "4MiB", store_process="always")
    with closing(ReplayEngine(chain_of(*tiers), MODEL, num_blocks=40)) as engine:
        ask_until = asker(engine)
        worker: Any = engine.workers[0]
        computed: Checksums = worker.connector.children[1]._host.checksums
        ask_until(lambda: computed._pause == 1)
        first = computed._process
        assert first is not None
        os.kill(first.number, signal.SIGKILL)
        ask_until(lambda: shown(engine) == ("degraded", 1))
        state, why = scheduler_of(engine, 1).condition()
        assert state == "degraded" and "checksums are computed by the engine's process" in why
        ask_until(lambda: shown(engine) == ("open", 1))
        assert computed._process not in (None, first)
        assert measured(engine, "store_failures", "disk") == 0


def test_no_process_computes_checksums_for_a_tier_that_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file")
    tiers = cpu(12), disk(tmp_path / "kv", store_process="always")
    with closing(ReplayEngine(chain_of(*tiers), MODEL, num_blocks=20)) as engine:
        engine.generate([1] * 40, 2)
        engine.settle()
        assert shown(engine)[0] == "refused"
        worker: Any = engine.workers[0]
        computed = worker.connector.children[1]._host.checksums
        computed._thread.submit(bool).result()  # behind what was begun
        assert computed._process is None


@pytest.mark.parametrize("has_device", [True, False])
def test_on_a_device_another_process_stores(has_device: bool, tmp_path: Path) -> None:
    for how, apart in {"auto": has_device, "always": True, "never": False}.items():
        tier = spec(tmp_path).model_copy(update={"store_process": how})
        assert tier.stores_apart(has_device) == apart
