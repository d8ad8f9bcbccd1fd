"""What differs between two chains, as an operator reads it before a change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spec.chain import ChainSpec
from spec.chain_diff import diff
from spec.load import SpecError, load_chain

CPU = {"type": "cpu", "capacity": "8GiB"}
REDIS = {"type": "redis", "url": "redis://cache:6379/0"}


def disk(path: str = "/var/lib/a", **more: Any) -> dict[str, Any]:
    return {"type": "disk", "path": path, "capacity": "64GiB", **more}


def chain(*tiers: dict[str, Any], **more: Any) -> ChainSpec:
    return load_chain({"version": 1, "tiers": list(tiers), **more})


def test_what_becomes_of_each_tier() -> None:
    old = chain(CPU, disk(), {**REDIS, "ttl": "1h"})
    new = chain(disk(store_threshold=2), CPU, disk("/srv/b", name="big"), load_policy="first")
    assert diff(old, new).lines() == [
        "tier disk: changed, load priority 1 (now 2); store_threshold: 1 -> 2",
        "tier cpu: kept, load priority 2 (now 1)",
        "tier big: added, load priority 3",
        "tier redis: drained",
        "load_policy: stitched -> first",
    ]
    assert diff(new, new).lines() == [
        f"tier {name}: kept, load priority {place}"
        for place, name in enumerate(("disk", "cpu", "big"), 1)
    ]
    larger = chain({**CPU, "capacity": "2GiB"}, disk(max_inflight="1GiB"))
    assert diff(chain(CPU, disk()), larger).lines() == [
        "tier cpu: resized, load priority 1; capacity: 8GiB -> 2GiB",
        "tier disk: changed, load priority 2; max_inflight: unset -> 1GiB",
    ]
    recorded = chain(CPU, disk(), record={"path": "/srv/trace"})
    assert diff(chain(CPU, disk()), recorded).lines()[2:] == ["record: changed"]
    other = chain({**REDIS, "name": "disk", "ttl": "1h"})
    assert diff(chain(disk()), other).lines() == [
        "tier disk: reopened, load priority 1; type: disk -> redis"
    ]


def test_what_a_tier_takes_only_when_it_opens() -> None:
    found = diff(chain(CPU, disk()), chain(CPU, disk(durability="sync", deadline="5s")))
    assert found.of_kind("reopened") == ("disk",) and not found.refused


def test_what_changes_nothing_in_an_engine_closes_no_tier() -> None:
    found = diff(chain(REDIS), chain({**REDIS, "maxmemory": "1GiB"}))
    assert found.of_kind("changed") == ("redis",) and not found.refused


@pytest.mark.parametrize(
    ("tiers", "settings", "words"),
    [
        ([CPU, disk()], {"salt": "x"}, "salt: every block is named by it: restart the engine"),
        ([CPU, disk()], {"staging": "1GiB"}, "staging: host memory is taken at the start"),
        ([disk()], {}, "tier cpu: a tier in host memory that comes or goes"),
        ([{**CPU, "eviction": "arc"}, disk()], {}, "tier cpu: eviction: the engine takes"),
        ([CPU, disk(name="other")], {}, "calls this tier 'disk': write name: disk"),
        ([CPU, disk("/srv/b"), disk()], {}, "tier disk-2: the running engine calls this tier"),
    ],
)
def test_what_is_refused_by_name(
    tiers: list[dict[str, Any]], settings: dict[str, Any], words: str
) -> None:
    found = diff(chain(CPU, disk()), chain(*tiers, **settings))
    assert any(words in line for line in found.refused), found.refused


def test_encryption_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("ab" * 32)
    with pytest.raises(SpecError, match="write the file's whole path"):
        chain(disk(encryption={"key_file": "keys"}))
    found = diff(chain(disk()), chain(disk(encryption={"key_file": str(tmp_path / "keys")})))
    assert "restart the engine" in found.refused[0] and "encryption" in found.refused[0]


def test_no_secret_is_shown() -> None:
    old = chain(CPU, REDIS, salt="pepper", tenants={"alice-salt": {"quota": "1GiB"}})
    new = chain(CPU, REDIS, salt="sesame")
    text = "\n".join(diff(old, new).lines()) + str(diff(old, new).as_json())
    for secret in ("pepper", "sesame", "alice-salt"):
        assert secret not in text
    assert "salt: changed" in text and "tenants: changed" in text
