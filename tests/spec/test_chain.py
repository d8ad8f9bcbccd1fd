"""ChainSpec: names, places, defaults, and its way through JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from spec.chain import ChainSpec, shown_chain
from spec.errors import SpecError
from spec.load import load_chain
from tiers.cpu.spec import CpuSpec

CPU = {"type": "cpu", "capacity": "8GiB"}


def disk(path: str, **more: Any) -> dict[str, Any]:
    return {"type": "disk", "capacity": "200GiB", "path": path, **more}


def redis(url: str = "redis://cache", **more: Any) -> dict[str, Any]:
    return {"type": "redis", "url": url, **more}


def chain(*tiers: dict[str, Any], **more: Any) -> ChainSpec:
    return load_chain({"version": 1, "tiers": list(tiers), **more})


def test_the_defaults() -> None:
    made = chain(CPU)
    assert (made.version, made.load_policy, made.promote, made.salt) == (1, "stitched", True, "")
    assert made.staging is None


def test_tiers_keep_their_order_and_settings() -> None:
    made = chain(CPU, disk("/a"), redis(ttl="1d"))
    cpu, on_disk, remote = made.tiers
    assert isinstance(cpu, CpuSpec) and cpu.capacity == 8 << 30
    assert on_disk.model_dump()["path"] == Path("/a")
    assert remote.model_dump()["ttl"] == 86400.0


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        ([None], ["disk"]),
        ([None, None, None], ["disk", "disk-2", "disk-3"]),
        (["nvme", None], ["nvme", "disk"]),
        ([None, "disk"], ["disk-2", "disk"]),
        ([None, None, "disk-2"], ["disk", "disk-3", "disk-2"]),
    ],
)
def test_every_tier_has_a_name_of_its_own(given: list[str | None], resolved: list[str]) -> None:
    made = chain(*(disk(f"/{n}", name=name) for n, name in enumerate(given)))
    assert [tier.name for tier in made.tiers] == resolved
    assert [tier.tier_name for tier in made.tiers] == resolved


def test_types_are_counted_apart() -> None:
    made = chain(CPU, disk("/a"), CPU, disk("/b"))
    assert [tier.name for tier in made.tiers] == ["cpu", "disk", "cpu-2", "disk-2"]


@pytest.mark.parametrize(
    ("tiers", "says"),
    [
        ((disk("/a"), disk("/a/")), r"tiers\[1\].path: .* tiers\[0\] .* another path"),
        ((disk("/b/../a"), CPU, disk("/a")), r"tiers\[2\].path: "),
        ((redis(), redis("redis://cache:6379/0")), r"tiers\[1\].url: .* url or key_prefix"),
        ((CPU, disk("/a", name="x"), redis(name="x")), r"tiers\[2\].name: .*tiers\[1\] has this"),
    ],
)
def test_two_tiers_are_not_one(tiers: tuple[dict[str, Any], ...], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        chain(*tiers)


def test_alike_is_not_the_same() -> None:
    chain(redis(key_prefix="a"), redis(key_prefix="b"), redis("redis://cache/1"), CPU, CPU)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"load_when": "soon"}, "load_when: found 'soon'; did you mean sooner"),
        ({"record": True}, r"record: found True; write its settings, like \{path: /var/lib/"),
        (
            {"tenants": {f"salt {n}": {"name": f"n{n}"} for n in range(100)}},
            "tenants: found a mapping; 99 names at most can be shown",
        ),
    ],
)
def test_settings_that_do_not_fit_are_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        chain(CPU, **settings)


def test_as_many_tenants_as_metrics_show_have_names() -> None:
    """Beside those that have none, which are shown as one."""
    tenants = {f"salt {n}": {"name": f"n{n}"} for n in range(99)}
    assert len(chain(CPU, tenants={**tenants, "nameless": {}}).tenants) == 100


def test_a_chain_goes_through_json_and_stays_what_it_was() -> None:
    tiers = ({**CPU, "capacity": 8589934593}, disk("/a"), disk("/b"), redis(timeout="1.25s"))
    made = chain(*tiers, staging="256MiB")
    assert ChainSpec.model_validate_json(made.model_dump_json()) == made
    written = made.model_dump(mode="json")
    assert written["staging"] == "256MiB" and written["tiers"][0]["capacity"] == "8589934593B"


def test_a_chain_is_made_of_specs_too_and_is_frozen() -> None:
    made = ChainSpec(version=1, tiers=(CpuSpec(capacity=1), CpuSpec(capacity=2)))
    assert [tier.name for tier in made.tiers] == ["cpu", "cpu-2"]
    with pytest.raises(ValidationError):
        made.promote = False  # type: ignore[misc]


def test_no_salt_shows() -> None:
    made = chain(redis("redis://cache"), salt="p3pper", tenants={"p3pper": {}})
    shown = shown_chain(made)
    assert not [s for s in (str(made), repr(made), str(shown)) if "p3pper" in s]
    assert (shown["salt"], shown["tenants"]) == ("***", 1)
    bare = shown_chain(chain(redis("redis://cache")))
    assert (bare["salt"], bare["tenants"]) == ("none", "none") and "record" not in bare
