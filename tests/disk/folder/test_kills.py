"""Processes killed at any moment: the folder opens clean, its books agree, every block is right."""

from __future__ import annotations

import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.disk.audit import MODE, SLOT, allocated, audit, get, keys, opened, put, run_code
from tests.disk.child import NUMBERS, POINTS, payload_of_number, running, started
from tiers.disk.disk_store import DiskStore
from tiers.disk.spec import DiskSpec
from tiers.errors import TierFull

pytestmark = pytest.mark.usefixtures("mode")
MODES = ("buffered none", "direct batch", "buffered sync")
BUFFERED = pytest.mark.parametrize("mode", ["buffered none"], indirect=True)


def check(store: DiskStore, others: bool = False) -> int:
    """The books agree, and every block that the index names is there and right; how many are.
    `others`: processes that go on change what it names meanwhile."""
    audit(store)
    named = store.usage().blocks
    served = sum(
        sum(get(store, keys(number), payload_of_number(number))) for number in range(NUMBERS)
    )
    assert (served == named or others) and store.damaged() == 0, "a row without its bytes"
    audit(store)
    return served


@pytest.mark.fault
@pytest.mark.parametrize("mode", ["buffered none", "direct batch", "direct sync"], indirect=True)
def test_killed_at_any_moment(tmp_path: Path) -> None:
    chance = random.Random(11)
    served = 0
    for round_ in range(4):
        child = started("churn", tmp_path, round_, 10**9)
        time.sleep(chance.uniform(0.0, 0.15))
        child.kill()
        with opened(tmp_path, slots=16) as store:
            served += check(store)
            assert store.usage().blocks == sum(store.peek(keys(*range(NUMBERS))))
    assert served > 15


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.fault
@pytest.mark.parametrize("mode", ["all of them in turn"], indirect=True)
def test_killed_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(5)
    served = 0
    for round_ in range(36):
        monkeypatch.setenv(MODE, MODES[round_ % 3])
        child = started("churn", tmp_path, round_, 10**9)
        time.sleep(chance.uniform(0.0, 0.3))
        child.kill()
        with opened(tmp_path, slots=16) as store:
            served += check(store)
    assert served > 180


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.fault
@BUFFERED
def test_killed_again_and_again_beside_others(tmp_path: Path) -> None:
    chance = random.Random(6)
    served = 0
    crowd = [started("churn", tmp_path, seed, 10**9) for seed in range(2)]
    for round_ in range(36):
        time.sleep(chance.uniform(0.0, 0.2))
        crowd.pop(0).kill()
        with opened(tmp_path, slots=16) as store:
            served += check(store, others=True)
        crowd.append(started("churn", tmp_path, round_, 10**9))
    for child in crowd:
        assert child.lives, "a bystander died of it"
        child.kill()
    with opened(tmp_path, slots=16) as store:
        served += check(store)
    assert served > 180


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.fault
@BUFFERED
def test_killed_while_the_tier_gives_space_back(tmp_path: Path) -> None:
    chance = random.Random(7)
    for round_ in range(12):
        child = started("shrink", tmp_path, round_)
        time.sleep(chance.uniform(0.0, 0.2))
        child.kill()
        with opened(tmp_path, slots=800) as store:
            named = [number for number in range(800) if store.has(keys(number))[0]]
            assert all(get(store, keys(*named), 9_000))
            assert len(named) == store.usage().blocks and store.damaged() == 0
            audit(store, lists=1 << 16)


@pytest.mark.fault
@BUFFERED
@pytest.mark.parametrize("point", POINTS)
def test_killed_inside(tmp_path: Path, point: str) -> None:
    for count in (1, 9):
        child = running("die", tmp_path, point, count)
        assert child.gone() == -signal.SIGKILL, "it never came to that point"
        with opened(tmp_path, slots=16) as store:
            check(store)
            assert store.usage().blocks == sum(store.peek(keys(*range(NUMBERS))))
        assert list((tmp_path / "owners").iterdir()) == []


@BUFFERED
def test_what_a_killed_one_left_on_the_disk_goes_as_another_opens_beside_a_third(
    tmp_path: Path,
) -> None:
    """As of an edit that was killed: disk space behind free slots, and behind the end of a file."""
    with opened(tmp_path) as store:
        put(store, keys(0, 1, 2))
        store.drop(keys(1))
        with pytest.raises(AssertionError):  # of one that was killed
            run_code(_LEAVE, tmp_path)
        assert allocated(tmp_path) > 5 * SLOT
        run_code("open_disk(path).close()", tmp_path)
        audit(store)
        assert get(store, keys(0, 1, 2)) == [True, False, True]


_LEAVE = """
slab = folder_of(open_disk(path)).slabs[SLOT]
slab.allocate(1)
slab.allocate(3, 5)
os.kill(os.getpid(), signal.SIGKILL)
"""


@BUFFERED
@pytest.mark.fault
def test_processes_share_a_folder_and_one_is_killed(tmp_path: Path) -> None:
    children = [running("churn", tmp_path, seed, 60) for seed in range(2)]
    victim = running("churn", tmp_path, 9, 10**9)
    with opened(tmp_path, slots=16) as store:
        for number in range(0, 2 * NUMBERS, 3):
            with suppress(TierFull):  # the others may have every slot reserved just now
                put(store, keys(number % NUMBERS), payload_of_number(number % NUMBERS))
            get(store, keys(number % NUMBERS), payload_of_number(number % NUMBERS))
        assert victim.hear() == "ready"
        victim.kill()
        for child in children:
            child.end(60)
    with opened(tmp_path, slots=16) as store:
        audit(store)
    assert list((tmp_path / "owners").iterdir()) == []


@BUFFERED
@pytest.mark.fault
def test_reservations_of_the_living_stay_and_of_the_dead_go(tmp_path: Path) -> None:
    child = started("reserve", tmp_path)
    with opened(tmp_path) as store:
        assert store.usage().used == 2 * SLOT
        assert put(store, keys(*range(8))) == [True] * 6 + [False] * 2
        audit(store)
    child.kill()
    with opened(tmp_path) as store:
        assert store.usage().used == 6 * SLOT
        assert put(store, keys(*range(8))) == [True] * 8
        audit(store)


def reboot(folder: Path) -> None:
    """Let what killed processes have left in a tier be of an earlier boot of this machine."""
    boot = "0" * 8 + "-0000-0000-0000-" + "0" * 12
    for owner in (folder / "owners").iterdir():
        owner.rename(owner.with_name(f"{boot}.{owner.name.partition('.')[2]}"))


@BUFFERED
@pytest.mark.fault
def test_a_reboot_after_the_last_one_closed_keeps_the_tier(tmp_path: Path) -> None:
    """Another had been killed by then: a tool whose session ended, or a rank that did not stop."""
    with opened(tmp_path) as store:
        child = started("reserve", tmp_path)
        child.kill()
        assert put(store, keys(0)) == [True]
    reboot(tmp_path)
    found = [one.found for one in DiskSpec(path=tmp_path, capacity=SLOT).examine()]
    assert any(text.startswith("it holds 1 blocks") for text in found), found
    with opened(tmp_path) as store:
        assert get(store, keys(0)) == [True]
        audit(store)


@BUFFERED
@pytest.mark.fault
def test_a_reboot_without_a_close_empties_the_tier(tmp_path: Path) -> None:
    child = started("churn", tmp_path, 1, 10**9)
    time.sleep(0.1)
    child.kill()
    reboot(tmp_path)
    found = [one.found for one in DiskSpec(path=tmp_path, capacity=SLOT).examine()]
    assert "it will start empty: the machine went down while it was in use" in found
    with opened(tmp_path, slots=16) as store:
        assert store.usage().blocks == store.usage().used == 0
        put(store, keys(0))
    with opened(tmp_path, slots=16) as store:
        assert get(store, keys(0)) == [True]
