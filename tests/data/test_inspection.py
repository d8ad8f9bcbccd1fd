"""What inspect shows of a tier, and gc removes, with real engines' stores beside them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.conftest import Ran
from tests.cli.conftest import kvtiers as kvtiers  # the fixture
from tests.data.test_verification import PAYLOAD, beside, chain_of
from tests.disk import audit as disk
from tests.support.redis_verbs import opened as opened_redis
from tests.support.redis_verbs import put as put_into_redis
from tests.support.servers import RedisServer
from tiers.block import KV_REVISION
from tiers.connector.scheduler.inventory.journal import Journal, Run
from tiers.contract.protocols import Origin
from tiers.data import inspection
from tiers.disk.index import edit
from tiers.disk.records import DiskRecords
from tiers.records import NamespaceNote, read_note
from tiers.remote.spec import RedisSpec
from tiers.testing import make_key

NOTE = NamespaceNote(
    model="HuggingFaceTB/SmolLM2-135M",
    engine="0.32.0",
    layout="5f2c",
    block_tokens=16,
    payload_bytes=PAYLOAD,
    rank=0,
    ranks=1,
    salted=True,
    lasts=True,
    opened=time.time(),
    revision=KV_REVISION,
)


def note_of(folder: Path, key: bytes, note: NamespaceNote) -> None:
    records = DiskRecords(folder)
    records.note(key[:16], note.encode())
    records.close()


def groups(ran: Ran) -> dict[str, dict[str, object]]:
    return {one["namespace"]: one for one in json.loads(ran.out)["disk"]["groups"]}


def test_blocks_are_shown_by_model_and_size_and_gc_drops_what_has_ended(
    tmp_path: Path, kvtiers: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, chain = tmp_path / "kv", chain_of(tmp_path / "kv")
    names = ("lasts", "ended", "old", "twins")
    lasting, ended, unknown, twin = (f"{name:-<16}block".encode() for name in names)
    more = [ended + bytes([number]) for number in range(2)]
    monkeypatch.setattr(inspection, "STEP", 2)
    with disk.opened(folder) as store:
        disk.put(store, [lasting, ended, *more, unknown, twin], PAYLOAD)
        note_of(folder, lasting, NOTE)
        note_of(folder, ended, replace(NOTE, lasts=False))
        # What a tier lists of a namespace may be the beginning of two.
        note_of(folder, twin, replace(NOTE, lasts=False))
        note_of(folder, twin[:8] + b"another-", replace(NOTE, lasts=False))
        status, found = beside("inspect", chain)
        assert status == 0 and found["disk"]["others"] is True
        _, while_open = beside("gc", chain, "--delete")
        assert while_open["disk"]["dropped"] == 0, "the engine that has it may be running"
    ran = kvtiers("inspect", chain)
    assert "SmolLM2-135M, vLLM 0.32.0, 16 tokens a block, layout 5f2c, salted" in ran.out
    found_groups = groups(kvtiers("inspect", chain, "--json"))
    standing = {bytes.fromhex(name)[:5]: one["standing"] for name, one in found_groups.items()}
    assert standing == {
        b"lasts": "usable",
        b"ended": "unusable",
        **dict.fromkeys((b"old--", b"twins"), "can't tell"),
    }
    assert "nothing was dropped" in kvtiers("gc", chain).out
    assert len(groups(kvtiers("inspect", chain, "--json"))) == 4
    dropped = json.loads(kvtiers("gc", chain, "--delete", "--json").out)["disk"]
    assert (dropped["dropped"], dropped["bytes"]) == (3, dropped["garbage"][0]["bytes"])
    with disk.opened(folder) as store:
        held = store.has([lasting, ended, *more, unknown, twin])
        assert held == [True, False, False, False, True, True]
    assert (
        "1 blocks dropped" in kvtiers("gc", chain, "--namespace", unknown[:8].hex(), "--delete").out
    )
    assert kvtiers("gc", chain, "--namespace", lasting[:7].hex()).status == 2
    with disk.opened(folder) as store:
        assert store.has([lasting, unknown]) == [True, False]
        disk.audit(store)


def test_what_only_engines_of_another_kvtiers_find_is_not_said_to_be_usable(
    tmp_path: Path, kvtiers: Callable[..., Ran]
) -> None:
    """A revision names all namespaces anew: the same facts had two groups that looked alike. It is
    no garbage, since engines of both may share a tier."""
    folder, chain = tmp_path / "kv", chain_of(tmp_path / "kv")
    whose = {"this": KV_REVISION, "other": KV_REVISION - 1}
    blocks = {name: f"{name:-<16}block".encode() for name in whose}
    with disk.opened(folder) as store:
        disk.put(store, [*blocks.values()], PAYLOAD)
    for name, revision in whose.items():
        note_of(folder, blocks[name], replace(NOTE, revision=revision))
    found = groups(kvtiers("inspect", chain, "--json"))
    told = {bytes.fromhex(name)[:5]: (one["standing"], one["why"]) for name, one in found.items()}
    assert told[b"this-"][0] == "usable"
    assert told[b"other"][0] == "can't tell" and "of another version" in str(told[b"other"][1])
    assert "nothing to drop" in kvtiers("gc", chain, "--delete").out


def test_what_nobody_used_for_long_goes_if_the_operator_says_so(
    tmp_path: Path, kvtiers: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what was opened of late goes, nor what was used by an engine opened long ago."""
    folder, chain = tmp_path / "kv", chain_of(tmp_path / "kv")
    opened, used, neither = (f"{name:-<16}block".encode() for name in ("opened", "used", "none"))
    older = used + b"older"
    long_ago, now = time.time() - 40 * 86400, time.time
    monkeypatch.setattr(time, "time", lambda: long_ago)
    with disk.opened(folder) as store:
        disk.put(store, [opened, neither, older], PAYLOAD)
        monkeypatch.setattr(time, "time", now)
        disk.put(store, [used], PAYLOAD)
        note_of(folder, opened, NOTE)
        note_of(folder, used, replace(NOTE, opened=long_ago))
        note_of(folder, neither, replace(NOTE, opened=long_ago))
    found = groups(kvtiers("inspect", chain, "--json"))[used[:8].hex()]
    assert (found["first_used"], found["last_used"]) == pytest.approx((long_ago, now()), abs=600)
    assert "nothing to drop" in kvtiers("gc", chain, "--unused", "50d").out
    assert "1 blocks dropped" in kvtiers("gc", chain, "--unused", "30d", "--delete").out
    with disk.opened(folder) as store:
        assert store.has([opened, used, neither]) == [True, True, False]
    records = DiskRecords(folder)
    assert {space[:4] for space in records.notes()} == {b"open", b"used"}
    records.close()


def test_what_is_from_before_its_tier_was_encrypted_is_told_and_goes(
    tmp_path: Path, kvtiers: Callable[..., Ran]
) -> None:
    """It has a note, which no engine of an encrypted tier leaves."""
    folder, chain = tmp_path / "kv", chain_of(tmp_path / "kv")
    plain, unknown = (f"{name:-<16}block".encode() for name in ("plain", "unknown"))
    (tmp_path / "keys").write_text("ab" * 32)
    chain.write_text(
        chain.read_text().replace("}]", f", encryption: {{key_file: {tmp_path / 'keys'}}}}}]")
    )
    with disk.opened(folder) as store:
        disk.put(store, [plain, unknown], PAYLOAD)
        note_of(folder, plain, NOTE)
        _, while_open = beside("gc", chain, "--delete")
        assert while_open["disk"]["dropped"] == 0, "an engine without encryption may be running"
    found = groups(kvtiers("inspect", chain, "--json"))
    told = {bytes.fromhex(name)[:5]: (one["standing"], one["why"]) for name, one in found.items()}
    assert told[b"plain"][0] == "unusable" and "in the clear" in str(told[b"plain"][1])
    assert told[b"unkno"][0] == "can't tell"
    assert "1 blocks dropped" in kvtiers("gc", chain, "--delete").out
    with disk.opened(folder) as store:
        assert store.has([plain, unknown]) == [False, True]
    records = DiskRecords(folder)
    assert not records.notes()
    records.close()


def test_what_was_announced_of_a_namespace_goes_with_it(
    tmp_path: Path, kvtiers: Callable[..., Ran]
) -> None:
    """Else the prompts' tokens would outlive their blocks. What a living engine keeps stays."""
    folder, chain = tmp_path / "kv", chain_of(tmp_path / "kv")
    chain.write_text(f"{chain.read_text()}events: {{folder: {tmp_path / 'events'}}}\n")
    named, empty, other = (f"{name:-<16}block".encode() for name in ("named", "empty", "other"))
    with disk.opened(folder) as store:
        disk.put(store, [named, other], PAYLOAD)
    places = {key: tmp_path / "events" / f"disk.{key[:16].hex()}" for key in (named, empty, other)}
    own = folder / "events" / named[:16].hex()
    living, *dead = map(Journal, (places[named], *places.values(), own))
    for one in dead:
        one.append(Run([named], 8, 0, 1, None, Origin([7])))
        one.close()
    wanted = ["--namespace", named[:8].hex(), "--namespace", empty[:16].hex()]
    assert kvtiers("gc", chain, *wanted).status == 0
    assert len(list(tmp_path.rglob("*.runs"))) == 4, "it was only shown"
    assert "1 blocks dropped" in kvtiers("gc", chain, *wanted, "--delete").out
    assert [file.parents[1] for file in tmp_path.rglob("*.runs")] == [places[other]]
    assert len(list(places[named].iterdir())) == 1 and not places[empty].exists()
    living.close()


def test_a_folder_that_cannot_be_looked_at_is_not_said_to_be_empty(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="too long"):
        next(DiskRecords(tmp_path / ("x" * 256)).listed())


def test_ages_are_those_of_the_last_use(
    tmp_path: Path, kvtiers: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within ten minutes, also of a tier that was used far more often than times are noted."""
    began, spent, moments = 1_700_000_000.0, [0.0], {}
    monkeypatch.setattr(time, "time", lambda: began + spent[0])
    with disk.opened(tmp_path / "kv", slots=3000) as store:
        for number in range(1200):
            spent[0] += 400
            disk.put(store, disk.keys(number), PAYLOAD)
            moments[number] = began + spent[0]
    records = DiskRecords(tmp_path / "kv")
    listed = sorted((r for piece in records.listed() for r in piece), key=lambda r: r.order)
    records.close()
    late = [moments[n] - (listed[n].used or 0) for n in range(600, 1200)]
    assert all(0 <= one <= edit.MOMENT_EVERY + 400 for one in late)
    early = [moments[n] - (listed[n].used or 0) for n in range(600)]
    assert all(-1 <= one <= 100 * edit.MOMENT_EVERY for one in early)


def test_redis_keeps_notes_that_are_no_blocks(
    server: RedisServer, tmp_path: Path, kvtiers: Callable[..., Ran]
) -> None:
    key = make_key()
    chain = tmp_path / "chain.yaml"
    chain.write_text(f"version: 1\ntiers: [{{type: redis, url: '{server.url}', ttl: 1h}}]\n")
    records = RedisSpec.model_validate({"url": server.url, "ttl": "1h"}).records()
    records.note(key[:16], NOTE.encode())
    assert server.client().pttl(b"kvtiers:namespace:" + key[:16].hex().encode()) > 3_500_000
    assert {space: read_note(text) for space, text in records.notes().items()} == {key[:16]: NOTE}
    with opened_redis(server.url) as store:
        assert put_into_redis(store, key) == [True]
    ran = kvtiers("inspect", chain)
    assert "redis: 1 blocks" in ran.out and "SmolLM2" in ran.out and "usable" in ran.out
    records.note(key[:16], replace(NOTE, lasts=False).encode())
    records.close()
    ran = kvtiers("gc", chain, "--delete")
    assert "nothing to drop" in ran.out, "engines on other hosts may have the server open"


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"model": 3}', b"\xff", NOTE.encode()[:-9]])
def test_a_note_of_another_version_is_none(text: bytes) -> None:
    assert read_note(text) is None
