"""Checksums behind gathers, where another process computes them: the same ones, whatever fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import pytest

from tests.support.topologies import wait_until
from tiers.block import digest
from tiers.concurrency import beside
from tiers.connector.worker import checksums
from tiers.connector.worker.checksums import Checksums
from tiers.contract.block_copier import ENDED
from tiers.host import digests
from tiers.host.slot_memory import SlotMemory

SIZE = 5000
"""No whole number of pages."""
SLOTS = 9

SLOW = """import time
from tiers.host import digests
digests.PART_BYTES = ROOM
digests.digest = lambda data, one=digests.digest: time.sleep(0.002) or one(data)
serve("""


@pytest.fixture
def memory() -> Iterator[SlotMemory]:
    made = SlotMemory(SLOTS, SIZE, pin=False)
    for slot in range(SLOTS):
        fill(made, slot)
    yield made
    made.close()


@pytest.fixture
def apart(memory: SlotMemory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checksums]:
    """Those of two rows at once, by a process that takes its time: what is copied too early would
    be in their place."""
    patched = SLOW.replace("ROOM", str(2 * SIZE))
    monkeypatch.setattr(beside, "_SERVE", beside._SERVE.replace("serve(", patched))
    made = Checksums(lambda: memory)
    made.are_kept = True
    made.compute_apart()
    wait_until(lambda: made._process is not None and made._process.is_ready())
    yield made
    made.close()


def fill(memory: SlotMemory, slot: int) -> None:
    memory.payload(slot)[:] = os.urandom(SIZE)


def expected(memory: SlotMemory, slots: Sequence[int]) -> list[bytes]:
    return [digest(memory.payload(slot)) for slot in slots]


def found(apart: Checksums, slots: Sequence[int]) -> list[bytes | None]:
    apart.begin(slots, ENDED)
    return apart.of(slots)


def number(apart: Checksums) -> int:
    assert apart._process is not None
    return apart._process.number


def is_there(process: int) -> bool:
    return os.path.exists(f"/proc/{process}")


@pytest.mark.parametrize("slots", [[0], [8, 1, 5], [2, 0], range(SLOTS)])
def test_another_process_computes_them(
    slots: Sequence[int], apart: Checksums, memory: SlotMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = expected(memory, slots)
    monkeypatch.setattr(checksums, "digest", None)
    for _ in range(2):
        assert found(apart, slots) == known
    fill(memory, slots[0])
    known[0] = digest(memory.payload(slots[0]))
    assert found(apart, slots) == known, "rows are copied anew"


def test_what_changes_later_shows(apart: Checksums, memory: SlotMemory) -> None:
    slots = range(SLOTS)
    before = found(apart, slots)
    memory.payload(4)[-1] ^= 1
    assert [a == b for a, b in zip(before, expected(memory, slots), strict=True)] == [
        slot != 4 for slot in slots
    ]
    apart.keep(4, None)
    assert apart.of([4]) == [None], "of no block"


def test_each_tier_may_ask_for_one_process(apart: Checksums, memory: SlotMemory) -> None:
    first = number(apart)
    apart.compute_apart()
    assert found(apart, [3]) == expected(memory, [3]) and number(apart) == first
    apart.compute_apart(-1)
    assert found(apart, [3]) == expected(memory, [3]) and number(apart) == first
    apart.compute_apart(-1)
    assert found(apart, [3]) == expected(memory, [3]) and not is_there(first)
    apart.compute_apart()
    assert found(apart, [3]) == expected(memory, [3]) and number(apart) != first


@pytest.mark.fault
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("has_served", [True, False])
def test_without_it_they_are_computed_here(
    how: int,
    has_served: bool,
    memory: SlotMemory,
    apart: Checksums,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert apart._process is not None
    if has_served:
        found(apart, [0])
    apart._process.limit(0.1)
    process, slots = number(apart), range(SLOTS)
    os.kill(process, how)
    for _ in range(2):
        assert found(apart, slots) == expected(memory, slots)
    assert not is_there(process)
    assert [line.levelname for line in caplog.records] == ["WARNING"]
    assert "computed by the engine's process" in caplog.text


def test_one_that_no_signal_may_end_ends_by_itself(
    memory: SlotMemory, apart: Checksums, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's rules may forbid signals."""

    def forbidden(self: subprocess.Popen[bytes]) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(subprocess.Popen, "kill", forbidden)
    found(apart, [0])
    assert apart._process is not None
    apart._process.limit(0.1)
    process = number(apart)
    os.kill(process, signal.SIGSTOP)
    try:
        assert found(apart, [1, 2]) == expected(memory, [1, 2])
    finally:
        os.kill(process, signal.SIGCONT)
    with suppress(ChildProcessError):  # it has been waited for
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)


def no_program(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys, "executable", "/nowhere/python")


def ends_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(beside, "_SERVE", "")


def says_too_little(patch: pytest.MonkeyPatch) -> None:
    less = "from tiers.host import digests\ndigests.digest = lambda _: b'short'\nserve("
    patch.setattr(beside, "_SERVE", beside._SERVE.replace("serve(", less))
    patch.setattr(digests, "ANSWER_SECONDS", 0.1)


def may_not_write(patch: pytest.MonkeyPatch) -> None:
    """As containers forbid it."""

    def refused(*_: object) -> None:
        raise OSError("its memory can't be written")

    patch.setattr(beside, "copy_into", refused)


def refused_there(patch: pytest.MonkeyPatch) -> None:
    """It tries the call on itself, before the engine's process makes it: here on nobody."""
    refuses = "import os\nos.getpid = lambda: 2**30\nserve("
    patch.setattr(beside, "_SERVE", beside._SERVE.replace("serve(", refuses))


@pytest.mark.fault
@pytest.mark.parametrize(
    ("why", "said"),
    [
        (no_program, "/nowhere/python"),
        (ends_at_once, "it ended with 0"),
        (says_too_little, "it has not answered in time"),
        (may_not_write, "its memory can't be written"),
        (refused_there, "No such process"),
    ],
)
def test_where_there_is_none_they_are_computed_here(
    why: Callable[[pytest.MonkeyPatch], None],
    said: str,
    memory: SlotMemory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    why(monkeypatch)
    made, slots = Checksums(lambda: memory), range(SLOTS)
    made.are_kept = True
    made.compute_apart()
    for _ in range(2):
        assert found(made, slots) == expected(memory, slots)
    wait_until(lambda: made._process is None or made._process.is_ready())
    assert found(made, slots) == expected(memory, slots)
    assert made._process is None and said in made.computed_here
    made.close()


@pytest.mark.fault
def test_one_that_can_not_be_begun_again_is_tried_again(
    memory: SlotMemory, apart: Checksums, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What killed one, as a lack of memory, may go on for more than a minute."""
    monkeypatch.setattr(checksums, "AGAIN_SECONDS", 0.0)
    slots = range(SLOTS)
    assert found(apart, slots) == expected(memory, slots)
    os.kill(number(apart), signal.SIGKILL)
    with monkeypatch.context() as patch:
        no_program(patch)
        for _ in range(3):
            assert found(apart, slots) == expected(memory, slots)
        assert apart._process is None and "/nowhere/python" in apart.computed_here

    def is_computed_apart() -> bool:
        return found(apart, slots) == expected(memory, slots) and not apart.computed_here

    wait_until(is_computed_apart)


def test_it_ends_with_the_worker(memory: SlotMemory) -> None:
    made = Checksums(lambda: memory)
    made.are_kept = True
    made.compute_apart()
    found(made, [0])
    process = number(made)
    made.close()
    wait_until(lambda: not is_there(process))  # a busy machine ends it late
    made.compute_apart()  # as for a tier that opens late
