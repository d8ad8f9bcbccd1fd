"""Engines of one model that share nothing say so when they open a tier."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from contextlib import closing
from pathlib import Path

import pytest

from spec.offloading import EncryptionSpec, StoreContext, StoreSpec
from tests.support.servers import RedisServer
from tests.support.topologies import wait_until
from tiers.block import KV_REVISION
from tiers.connector.worker import namespace_notes
from tiers.connector.worker.namespace_notes import (
    GENERATIONS,
    NamespaceNotes,
    _mark,
    logger,
    note_of,
)
from tiers.disk.spec import DiskSpec
from tiers.remote.object_spec import ObjectSpec
from tiers.remote.packs.bucket import BucketMarks
from tiers.remote.shared_spec import SharedSpec
from tiers.remote.spec import RedisSpec


def redis(server: RedisServer) -> RedisSpec:
    prefix = secrets.token_hex(4)
    return RedisSpec.model_validate({"url": server.url, "key_prefix": prefix, "timeout": "30s"})


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What notes said: of a test before, a thread may still log into this one."""
    return [record.getMessage() for record in caplog.records if record.name == logger.name]


@pytest.fixture(params=["redis", "shared", "object"])
def shared_tier(
    request: pytest.FixtureRequest, shared_server: RedisServer, tmp_path: Path
) -> StoreSpec:
    place = tmp_path / "tier"
    place.mkdir()
    made: dict[str, StoreSpec] = {
        "redis": redis(shared_server),
        "shared": SharedSpec(path=place),
        "object": ObjectSpec(url=f"file://{place}"),
    }
    return made[request.param]


@pytest.mark.parametrize(
    ("model", "ranks", "rank", "warns"),
    [
        ("org/model", 1, 0, True),
        ("org/model", 2, 0, False),
        ("org/model", 4, 1, False),  # rank 0 does
        ("org/other", 1, 0, False),
    ],
)
def test_a_folder_with_kv_of_another_tensor_parallel_size_is_named_with_the_cost(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    model: str,
    ranks: int,
    rank: int,
    warns: bool,
) -> None:
    caplog.set_level(logging.WARNING)
    spec = DiskSpec(path=tmp_path, capacity=1 << 20)
    spec.open(StoreContext(4096)).close()
    of_two = note_of({}, "org/model", 16, 40960, ranks=2)
    assert of_two.revision == KV_REVISION
    NamespaceNotes(spec, of_two).keep(bytes(16), lasts=True)
    assert not logged(caplog)
    mine = NamespaceNotes(spec, note_of({}, model, 16, 81920, rank, ranks))
    mine.keep(b"1" * 16, lasts=True)
    mine.keep(b"2" * 16, lasts=False)  # a generation's
    said = logged(caplog)
    assert len(said) == warns, "once"
    if said:
        assert "KV of org/model from engines of 2 rank(s), and this one has 1" in said[0]
        assert "5KiB a token" in said[0]


def test_of_a_shared_tier_engines_of_other_sizes_are_named_too(
    shared_tier: StoreSpec, caplog: pytest.LogCaptureFixture
) -> None:
    """At a cost that is the same however much the tier holds: no server lists its names."""
    caplog.set_level(logging.WARNING)

    def said(model: str, ranks: int, number: int) -> list[str]:
        caplog.clear()
        note = note_of({}, model, 16, 81920 // ranks, ranks=ranks)
        NamespaceNotes(shared_tier, note).keep(bytes([number]) * 16, lasts=True)
        return logged(caplog)

    assert said("org/model", 2, 1) == []
    assert said("org/other", 1, 2) == []
    (line,) = said("org/model", 1, 3)
    assert "KV of org/model from engines of 2 rank(s), and this one has 1" in line
    assert "5KiB a token" in line
    (line,) = said("org/model", 4, 4)
    assert "from engines of 1 and 2 rank(s), and this one has 4" in line
    assert "5KiB a token" in line


def test_an_engine_whose_weights_change_often_leaves_few_notes(tmp_path: Path) -> None:
    """They lie beside the tier's capacity, and for ever."""
    spec = DiskSpec(path=tmp_path, capacity=1 << 20)
    spec.open(StoreContext(4096)).close()
    notes = NamespaceNotes(spec, note_of({}, "org/model", 16, 40960))
    spaces = [bytes([number]) * 16 for number in range(GENERATIONS + 5)]
    notes.keep(bytes(15) + b"x", lasts=True)
    for space in spaces:
        notes.keep(space, lasts=False)
    with closing(spec.records()) as records:
        assert set(records.notes()) == {bytes(15) + b"x", *spaces[-GENERATIONS:]}


@pytest.mark.parametrize("has_records", [True, False])
def test_an_engine_whose_weights_change_often_remembers_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_records: bool
) -> None:
    monkeypatch.setattr(namespace_notes, "AGAIN_S", 0.0)
    spec = DiskSpec(path=tmp_path, capacity=1 << 20)
    spec.open(StoreContext(4096)).close()
    if not has_records:
        monkeypatch.setattr(DiskSpec, "records", lambda spec: None)
    notes = NamespaceNotes(spec, note_of({}, "org/model", 16, 40960))
    for number in range(GENERATIONS + 5):
        notes.begin(bytes([number]) * 16, lasts=False)
        wait_until(lambda: notes._last is not None and notes._last.done())
    assert len(notes._begun) == 1 and len(notes._passing) == GENERATIONS


def test_of_an_encrypted_tier_nothing_is_noted(
    shared_tier: StoreSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    key = tmp_path / "key"
    key.write_text(secrets.token_hex(32))
    hidden = shared_tier.model_copy(update={"encryption": EncryptionSpec(key_file=key)})
    for ranks in (1, 2):
        note = note_of({}, "org/model", 16, 81920, ranks=ranks)
        notes = NamespaceNotes(hidden, note)
        notes.keep(bytes([ranks]) * 16, lasts=True)
        notes.begin(bytes([ranks]) * 16, lasts=True)
    assert not logged(caplog)
    marks = shared_tier.marks()
    assert marks is not None
    assert not any(marks.marked([_mark("org/model", ranks) for ranks in (1, 2)]))
    marks.close()


def test_a_mark_of_a_server_outlives_a_block_since_its_engine_may(
    shared_server: RedisServer,
) -> None:
    spec = redis(shared_server).model_copy(update={"ttl": 60.0})
    NamespaceNotes(spec, note_of({}, "org/model", 16, 81920)).keep(bytes(16), lasts=True)
    with shared_server.client() as client:
        lives = {name: client.ttl(name) for name in client.keys(f"{spec.key_prefix}:*")}
    assert len(lives) == 2
    assert all((lives[name] > 86400) == (b":size:" in name) for name in lives)


def test_a_mark_of_a_directory_is_used_by_each_start(tmp_path: Path) -> None:
    spec, note = SharedSpec(path=tmp_path), note_of({}, "org/model", 16, 81920)
    NamespaceNotes(spec, note).keep(bytes(16), lasts=True)
    (mark,) = (path for path in tmp_path.rglob("*") if path.is_file())
    os.utime(mark, (1, 1))
    NamespaceNotes(spec, note).keep(bytes(16), lasts=True)
    assert mark.stat().st_mtime > 1, "what was used least recently is evicted"


@pytest.mark.parametrize("lasts", [True, False])
def test_a_note_that_went_is_kept_anew(
    shared_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    lasts: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A server evicts it first: nobody asks for it. Or it expires before blocks that came later."""
    caplog.set_level(logging.INFO)
    spec = redis(shared_server)
    name = f"{spec.key_prefix}:namespace:{bytes(16).hex()}"
    notes = NamespaceNotes(spec, note_of({}, "org/model", 16, 81920))
    with shared_server.client() as client:
        notes.begin(bytes(16), lasts)
        wait_until(lambda: client.exists(name) == 1)
        client.delete(name)
        wait_until(lambda: notes._last is not None and notes._last.done())
        notes.begin(bytes(16), lasts)
        wait_until(lambda: notes._last is not None and notes._last.done())
        assert client.exists(name) == 0, "each put would keep one"
        monkeypatch.setattr(namespace_notes, "AGAIN_S", 0.0)
        for _ in range(GENERATIONS + 1):
            notes.begin(bytes(16), lasts)
            wait_until(lambda: notes._last is not None and notes._last.done())
            assert client.exists(name) == 1
    (line,) = logged(caplog)
    assert line == f"tier 'redis': rank 0 has its blocks under the namespace {bytes(16).hex()}"


class WaitingBucket:
    """Answers no read before another one has come."""

    def __init__(self) -> None:
        self.asked: set[str] = set()
        self.are_two = threading.Event()

    def read(self, name: str, start: int, into: object) -> int | None:
        self.asked.add(name)
        if len(self.asked) > 1:
            self.are_two.set()
        assert self.are_two.wait(10)
        return None

    def close(self) -> None:
        """Nothing is open."""


def test_a_slow_bucket_is_asked_for_several_marks_at_once() -> None:
    marks = BucketMarks(WaitingBucket())  # type: ignore[arg-type]
    assert marks.marked([bytes([size]) * 16 for size in range(9)]) == [False] * 9


def test_marks_are_no_records_of_a_tool(shared_server: RedisServer) -> None:
    spec = redis(shared_server)
    note = note_of({}, "org/model", 16, 81920)
    NamespaceNotes(spec, note).keep(b"5" * 16, lasts=True)
    records = spec.records()
    with closing(records):
        assert [*records.listed()] == []
        assert [*records.notes()] == [b"5" * 16]
