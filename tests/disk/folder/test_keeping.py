"""Files of the tier that somebody removes while it is open: told, and never half shared."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.disk.audit import Other, get, keys, opened, put, refused
from tiers.disk.folder import keeping, upkeep
from tiers.errors import TierNotOpen

SHORT_S = 0.02
WAIT_S = 30.0
OPEN = """
store = open_disk(path)
assert put(store, keys(0)) == [True]
say("open")
wait()
assert get(store, keys(0)) == [True]
assert put(store, keys(1)) == [True]
audit(store)
store.close()
"""


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is done in the background be done at once."""
    monkeypatch.setattr(upkeep, "EVERY_S", SHORT_S)
    monkeypatch.setattr(keeping, "EVERY_S", SHORT_S)


@pytest.mark.fault
@pytest.mark.parametrize("name", ["index.mdb", "index.mdb-lock"])
def test_no_process_joins_where_a_file_was_removed(tmp_path: Path, name: str) -> None:
    other = Other(OPEN, tmp_path)
    assert other.hear() == "open"
    (tmp_path / name).unlink()
    refused(tmp_path, f"{name} was removed, which other processes have open; end them all")
    assert not (tmp_path / name).exists()
    other.tell()
    other.end()
    with opened(tmp_path) as store:
        assert put(store, keys(3)) == [True]
        assert get(store, keys(3)) == [True]


@pytest.mark.usefixtures("often")
def test_what_is_removed_under_an_open_tier_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as store:
        put(store, keys(0))
        (tmp_path / "index.mdb-lock").unlink()
        end = time.monotonic() + WAIT_S
        while "removed while" not in caplog.text and time.monotonic() < end:
            time.sleep(SHORT_S)
        time.sleep(5 * SHORT_S)
        assert get(store, keys(0)) == [True]
    assert caplog.text.count("removed while the tier is open: index.mdb-lock;") == 1


@pytest.mark.usefixtures("often")
def test_a_folder_above_which_a_file_came_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all else of upkeep fails, too."""
    monkeypatch.setattr(keeping, "PLACE_EVERY_S", SHORT_S)
    (tmp_path / "mount").mkdir()
    with opened(tmp_path / "mount" / "tier") as store:
        put(store, keys(0))
        (tmp_path / "mount").rename(tmp_path / "elsewhere")
        (tmp_path / "mount").write_text("a file")
        end = time.monotonic() + WAIT_S
        with pytest.raises(TierNotOpen, match="was removed or replaced"):
            while time.monotonic() < end:
                get(store, keys(0))
                time.sleep(SHORT_S)


@pytest.mark.usefixtures("often")
def test_no_file_of_an_open_tier_looks_old(tmp_path: Path) -> None:
    """What cleans /tmp would remove the owner's file and the lock, and let another process in."""
    with opened(tmp_path) as store:
        put(store, keys(0))
        files = [file for file in tmp_path.rglob("*") if file.is_file()]
        assert {"index.mdb", "index.mdb-lock", "lock"} < {file.name for file in files}
        for file in files:
            os.utime(file, (0, 0))
        end = time.monotonic() + WAIT_S
        while any(file.stat().st_mtime < 1 for file in files) and time.monotonic() < end:
            time.sleep(SHORT_S)
        assert [file.name for file in files if min(file.stat()[7:9]) < 1] == []


def test_a_link_above_the_folder_that_leads_elsewhere_keeps_nothing_open(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    link = tmp_path / "link"
    link.symlink_to("old")
    with opened(link / "tier") as store:
        put(store, keys(0))
        link.unlink()
        link.symlink_to("new")
        with opened(link / "tier") as other:
            assert get(other, keys(0)) == [False]
        assert get(store, keys(0)) == [True]
    assert list((tmp_path / "old" / "tier" / "owners").iterdir()) == []
    with opened(tmp_path / "old" / "tier") as store:
        assert get(store, keys(0)) == [True]


def test_a_folder_that_was_moved_is_closed(tmp_path: Path) -> None:
    with opened(tmp_path / "tier") as store:
        put(store, keys(0))
        (tmp_path / "tier").rename(tmp_path / "moved")
        (tmp_path / "tier").symlink_to("moved")
    assert list((tmp_path / "moved" / "owners").iterdir()) == []
    with opened(tmp_path / "moved") as store:
        assert get(store, keys(0)) == [True]
