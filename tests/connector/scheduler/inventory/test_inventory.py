"""What was announced is kept as it was or not at all, and costs the engine nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.clock import wait_for
from tiers.connector.scheduler.inventory import inventory, journal
from tiers.connector.scheduler.inventory.inventory import Due, Inventory
from tiers.connector.scheduler.inventory.journal import Journal, Run, pack, read, unpack
from tiers.contract.protocols import UNKNOWN, Origin


def run_of(first: int, blocks: int = 3, **origin: object) -> Run:
    keys = [n.to_bytes(4, "big") * 8 + b"\0\0" for n in range(first, first + blocks)]
    tokens = list(range(first * 2, (first + blocks) * 2))
    return Run(keys, 32, 0, 2, b"p" * 32, Origin(tokens, **origin))  # type: ignore[arg-type]


def test_a_run_comes_back_as_it_was() -> None:
    runs = [
        run_of(1),
        run_of(5, lora_id=3, lora_name="a")._replace(parent=None),
        run_of(9, extra_keys=[("salt",), None, (("image", 4),)]),
    ]
    assert list(unpack(b"".join(map(pack, runs)))) == runs


def test_parts_of_a_run_have_their_own_parents_and_tokens() -> None:
    whole = run_of(1, 5, extra_keys=[(n,) for n in range(5)])
    first, second = whole.held([True, False, False, True, True])
    assert first == whole._replace(keys=whole.keys[:1], origin=Origin([2, 3], extra_keys=[(0,)]))
    assert second == whole._replace(
        keys=whole.keys[3:],
        parent=whole.hashes[2],
        origin=Origin([8, 9, 10, 11], extra_keys=[(3,), (4,)]),
    )


def test_damage_costs_runs_and_changes_none() -> None:
    runs = [run_of(1), run_of(9), run_of(20)]
    data = b"".join(map(pack, runs))
    for place in range(len(data)):
        spoilt = bytearray(data)
        spoilt[place] ^= 1
        found = list(unpack(bytes(spoilt)))
        assert found == runs[: len(found)] and len(found) < 3
        assert list(unpack(data[:place])) == runs[: len(list(unpack(data[:place])))]


@pytest.mark.parametrize(
    ("head", "keys"),
    [(b"[" * 100_000, 0), (b'[0, 2, "", null, null, null]', 100_000)],
)
def test_whoever_writes_the_checksum_too_gets_no_more(head: bytes, keys: int) -> None:
    body = journal._HEAD.pack(34, 32, keys, len(head)) + head
    lie = journal._FRAME.pack(len(body), zlib.crc32(body)) + body
    assert list(unpack(pack(run_of(1)) + lie + pack(run_of(9)))) == [run_of(1)]


def test_only_the_user_can_read_what_is_kept(tmp_path: Path) -> None:
    made = Journal(tmp_path / "events" / "namespace")
    made.append(run_of(1))
    made.close()
    found = list((tmp_path / "events").rglob("*"))
    assert {p.stat().st_mode & 0o777 for p in found if p.is_dir()} == {0o700}
    assert {p.stat().st_mode & 0o777 for p in found if p.is_file()} == {0o600}


def test_files_of_the_living_are_left_alone_and_those_of_the_dead_come_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 1)  # a file for each run
    folder = tmp_path / "events" / "namespace"
    first, second = Journal(folder), Journal(folder)
    runs = [run_of(number) for number in (1, 5, 9)]
    assert all(map(first.append, runs))
    assert list(second.dead()) == []
    first.close()
    (next(second.dead()).parent / "00000009.draft").touch()  # it died while it wrote
    assert [read(file) for file in second.dead()] == [[run] for run in runs]
    (folder / "killed before it had a lock").mkdir()
    for file in second.dead():
        file.unlink()
    assert len(list(folder.iterdir())) == 1, "what was taken over is gone"
    second.close()


def test_engines_that_start_at_once_have_a_journal_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One looks for what the dead left at the very moment at which the other has made its folder,
    and again when it has made its lock, before it has locked it."""
    folder = tmp_path / "events" / "namespace"
    first = Journal(folder)
    real_open, real_flock, looks = os.open, fcntl.flock, [1, 1]

    def looked(when: int) -> None:
        if looks[when]:
            looks[when] = 0
            assert list(first.dead()) == []

    def opens(*arguments: Any, **more: Any) -> int:
        looked(0)
        return real_open(*arguments, **more)

    def locks(file: int, how: int) -> None:
        looked(1)
        real_flock(file, how)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opens)
        patch.setattr(fcntl, "flock", locks)
        second = Journal(folder)
    assert looks == [0, 0]
    assert second.append(run_of(1))
    assert list(first.dead()) == [], "it lives"
    second.close()
    assert [read(file) for file in first.dead()] == [[run_of(1)]]
    first.close()


def test_what_the_dead_left_is_taken_over_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other engine is done with a folder when this one has opened its lock, and no sooner."""
    folder = tmp_path / "events" / "namespace"
    dead, first, second = (Journal(folder) for _ in range(3))
    dead.append(run_of(1))
    lock = (dead._mine / "lock").stat().st_ino
    dead.close()
    real, looks = fcntl.flock, [True]

    def locks(file: int, how: int) -> None:
        if looks and os.fstat(file).st_ino == lock:
            looks.clear()
            for left in first.dead():
                left.unlink()
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", locks)
    assert list(second.dead()) == [] and not looks
    first.close()
    second.close()


def test_what_other_namespaces_left_long_ago_is_removed(
    opened: Callable[..., Inventory], tmp_path: Path
) -> None:
    """As of weights of before, of which nobody takes anything over."""
    events = tmp_path / "events"
    names = [f"{tier}{number:032x}" for number, tier in enumerate(("", "redis.", "", "disk."))]
    made = [Journal(events / name) for name in names]
    assert all(one.append(run_of(1)) for one in made)
    long_ago, of_late, strange, living = (events / name for name in names)
    for one in made[:3]:
        one.close()
    strange = strange.rename(events / "not-a-namespace")
    old = time.time() - journal.FORGOTTEN_SECONDS - 60
    for folder in (long_ago, strange, living):
        for path in [*folder.rglob("*"), folder]:
            os.utime(path, (old, old))
    os.utime(of_late, (old, old))  # its files are new
    opened(lambda keys: [True] * len(keys), events / f"{9:032x}")
    wait_for(lambda: not long_ago.exists())
    opened(lambda keys: [True] * len(keys), events / f"{9:032x}").close()
    assert all(list(folder.rglob("*.runs")) for folder in (of_late, strange, living))
    made[3].close()


def test_a_folder_without_locks_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As some file systems of networks have none."""

    def none(file: int, how: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", none)
    made = Inventory("slow", tmp_path / "events", Held(), lambda keys: None)
    wait_for(lambda: "tier 'slow'" in caplog.text)
    made.close()
    assert "tier 'slow': what is announced can't be kept" in caplog.text


def test_what_can_not_be_kept_is_counted(tmp_path: Path) -> None:
    made = Journal(tmp_path / "events" / "namespace")
    assert not made.append(run_of(1, extra_keys=[(b"bytes",)] * 3))
    assert made.append(run_of(5))
    assert [read(file) for file in made.closed()] == []
    made.rotate()
    assert [read(file) for file in made.closed()] == [[run_of(5)]]
    made.close()


class Held:
    """A tier that can't say what it holds until it is told to."""

    def __init__(self) -> None:
        self.can_say = threading.Event()
        self.asked = threading.Event()

    def __call__(self, keys: Sequence[bytes]) -> list[bool] | None:
        self.asked.set()
        return [True] * len(keys) if self.can_say.is_set() else None


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Inventory]]:
    """Make inventories of one folder."""
    made: list[Inventory] = []

    def make(holds: inventory.Holds, folder: Path | None = tmp_path / "events" / "n") -> Inventory:
        made.append(Inventory("disk", folder, holds, lambda keys: None))
        return made[-1]

    yield make
    for one in made:
        one.close()


def due(of: Inventory, count: int) -> list[Due]:
    found: list[Due] = []
    deadline = time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < deadline
        found += of.take()
        time.sleep(0.002)
    return found


def lost(of: Inventory, count: int) -> list[bytes]:
    """The next so many blocks that are told as lost, sorted: a look may come at any moment of
    what a test changes."""
    found: list[bytes] = []
    while len(found) < count:
        for one in due(of, 1):
            assert not one.held
            found += one.run.hashes
    return sorted(found)


def test_a_tier_that_is_down_is_asked_again_and_the_engine_need_not_step(
    opened: Callable[..., Inventory], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = opened(Held())
    before.note(run_of(1))
    before.close()
    monkeypatch.setattr(inventory, "STUCK_SECONDS", 0.0)
    held = Held()
    after = opened(held)
    assert held.asked.wait(60)
    assert not after.is_announcing
    assert list(after.take()) == []
    held.can_say.set()
    assert due(after, 1) == [Due(run_of(1), held=True)]


@pytest.mark.fault
@pytest.mark.parametrize("lacks", ["a folder of its own", "the folder around it"])
def test_a_folder_that_can_not_be_made_is_said_once_and_losses_are_told(
    opened: Callable[..., Inventory],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    lacks: str,
) -> None:
    monkeypatch.setattr(inventory, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(inventory, "AUDIT_EVERY", 0.0)
    (tmp_path / "events").write_text("not a folder")
    parts = ["n"] if lacks == "a folder of its own" else ["no", "such", "folder"]
    held = {*run_of(1).keys, *run_of(5).keys}
    folder = (tmp_path / "events" if len(parts) == 1 else tmp_path).joinpath(*parts)
    failing = opened(lambda keys: [key in held for key in keys], folder)
    failing.note(run_of(1))
    failing.note(run_of(5))
    wait_for(lambda: failing.dropped == 6)
    held.difference_update(run_of(1).keys[1:])
    assert lost(failing, 2) == list(run_of(2, 2).hashes)
    held.clear()
    assert lost(failing, 4) == [*run_of(1, 1).hashes, *run_of(5).hashes]
    wait_for(lambda: not failing.is_announcing)
    assert failing.dropped == 6
    assert caplog.text.count("is not announced again after a restart") == 1


def test_an_idle_engine_steps_for_what_was_lost_and_not_for_each_look(
    opened: Callable[..., Inventory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "AUDIT_EVERY", 0.0)
    held, says = {*run_of(1).keys}, list[bool]()

    def holds(keys: Sequence[bytes]) -> list[bool]:
        says.append(of.is_announcing)
        return [key in held for key in keys]

    of = opened(holds, None)
    of.note(run_of(1))
    of.note(run_of(5))
    assert lost(of, 3) == sorted(run_of(5).hashes)
    says.clear()
    wait_for(lambda: len(says) > 3)
    assert not any(says), "nothing is due"


def test_what_may_lie_in_no_file_is_bounded_and_counted(
    opened: Callable[..., Inventory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "AUDIT_EVERY", 0.0)
    stripped = run_of(1)._replace(parent=None, origin=UNKNOWN)
    monkeypatch.setattr(inventory, "MAX_BYTES", 4 * len(pack(stripped)))
    held = {key for number in range(1, 60) for key in run_of(number).keys}
    of = opened(lambda keys: [key in held for key in keys], None)
    assert not of.is_announcing
    for number in range(1, 19, 3):
        of.note(run_of(number))
    wait_for(lambda: of.dropped == 6)
    held.clear()
    assert lost(of, 12) == list(run_of(1, 12).hashes)
    held.update(run_of(30).keys)
    of.note(run_of(30))  # what the tier evicted has made room
    wait_for(lambda: of._remembered._bytes > 0)
    assert of.dropped == 6


def test_what_no_file_can_hold_is_told_as_lost(
    opened: Callable[..., Inventory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "AUDIT_EVERY", 0.0)
    made = opened(lambda keys: [False] * len(keys))
    made.note(run_of(1, extra_keys=[(b"bytes",)] * 3))
    made.note(run_of(9), lasts=False)
    assert lost(made, 6) == [*run_of(1).hashes, *run_of(9).hashes]
    assert made.dropped == 3, "the second is not meant to last"


def test_a_disk_that_is_full_for_a_moment_costs_the_next_engine_what_it_could_not_take(
    opened: Callable[..., Inventory],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real, full = journal._write, [True]

    def write(file: int, data: bytes) -> None:
        if full:
            full.pop()
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, data)

    monkeypatch.setattr(journal, "_write", write)
    monkeypatch.setattr(inventory, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(inventory, "AUDIT_EVERY", 0.0)
    made = opened(lambda keys: [False] * len(keys))
    made.note(run_of(1))
    wait_for(lambda: made.dropped == 3)
    made.note(run_of(9))
    assert lost(made, 6) == [*run_of(1).hashes, *run_of(9).hashes]
    assert made.dropped == 3
    assert "tier 'disk': what is announced can't be kept" in caplog.text


def test_an_engine_that_stores_little_keeps_few_files(
    opened: Callable[..., Inventory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "AUDIT_EVERY", 0.0)
    monkeypatch.setattr(inventory, "PAUSE", 0.001)
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 8 * len(pack(run_of(100))))
    asked: set[bytes] = set()

    def holds(keys: Sequence[bytes]) -> list[bool]:
        asked.update(keys)
        return [True] * len(keys)

    of, runs = opened(holds), [run_of(100 + 10 * number) for number in range(20)]
    for run in runs:
        of.note(run)
        wait_for(partial(asked.issuperset, run.keys))  # it is in a file that is closed
    wait_for(lambda: len(list(tmp_path.glob("events/n/*/*.runs"))) <= 4)
    of.close()
    files = sorted(tmp_path.glob("events/n/*/*.runs"))
    assert [run for file in files for run in read(file)] == runs, "each once, in order"
    assert [one.run for one in due(opened(holds), 20)] == runs


def test_what_is_due_waits_for_steps_which_take_a_bounded_part(
    opened: Callable[..., Inventory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "PER_STEP", 6)
    held = Held()
    held.can_say.set()
    before = opened(held)
    runs = [run_of(10 * number) for number in range(20)]
    for run in runs:
        before.note(run)
    before.close()
    after = opened(held)
    found: list[Due] = []
    deadline = time.monotonic() + 60
    while len(found) < 20:
        assert time.monotonic() < deadline
        step = list(after.take())
        assert len(step) <= 2
        found += step
    assert [one.run for one in found] == runs


def test_what_two_threads_do_not_keep_at_once_is_counted_whole() -> None:
    made = Inventory("disk", None, lambda keys: [True] * len(keys), lambda keys: None)
    made.close()

    class Meanwhile(list[bytes]):
        """Keys that are counted while the inventory's thread counts others."""

        def __len__(self) -> int:
            made._remember(run_of(1), should_last=True)
            return 5

    made.note(run_of(9)._replace(keys=Meanwhile()))
    assert made.dropped == 3 + 5


def test_a_loss_that_is_found_while_its_block_is_noted_is_announced(
    opened: Callable[..., Inventory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was evicted as soon as it was stored; nobody would notice it later."""
    monkeypatch.setattr(inventory, "AUDIT_EVERY", 0.0)
    made = opened(lambda keys: [False] * len(keys))
    give = made._noted.give

    def looked_through(item: tuple[Run, bool], weight: int) -> bool:
        is_given = give(item, weight)
        wait_for(lambda: len(made._due) == 1)
        return is_given

    monkeypatch.setattr(made._noted, "give", looked_through)
    made.note(run_of(1))
    (loss,) = made.take()
    assert loss == Due(run_of(1), held=False)


def test_what_another_tier_holds_is_looked_for_once_however_often_it_was_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A small tier stores and evicts in turn what a large one below keeps."""
    monkeypatch.setattr(inventory, "AUDIT_EVERY", 0.0)
    monkeypatch.setattr(inventory, "PAUSE", 0.001)
    asked: list[int] = []
    there = threading.Event()

    def elsewhere(keys: Sequence[bytes]) -> list[bool]:
        asked.append(len(keys))
        return [not there.is_set()] * len(keys)

    made = Inventory("disk", None, lambda keys: [False] * len(keys), elsewhere)
    for _ in range(5):
        made.note(run_of(1))
        count = len(asked)
        wait_for(lambda: len(asked) > count + 10)  # noqa: B023 - it is called here alone
    assert not list(made.take())
    there.set()
    assert lost(made, 3) == list(run_of(1).hashes)
    made.close()
    assert not list(made.take()), "it is not told as lost once more"


def test_a_note_that_is_refused_takes_no_earlier_one_along(
    opened: Callable[..., Inventory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier copy's loss would be announced of a block that the tier has stored again."""
    made = opened(lambda keys: [True] * len(keys))
    made.note(run_of(1))
    monkeypatch.setattr(made._noted, "give", lambda item, weight: False)
    made.note(run_of(1))
    assert made._announced >= {*run_of(1).keys} and made.dropped == len(run_of(1).keys)


def test_what_is_not_taken_is_not_remembered() -> None:
    made = Inventory("disk", None, lambda keys: [True] * len(keys), lambda keys: None)
    made.close()
    made.note(run_of(1))
    assert made.dropped == 3 and not made._announced
