"""Tier types from entry points: ours, a plugin's, and plugins that are broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from spec.errors import SpecError
from spec.load import load_chain
from spec.registry import tier_class, tier_types
from spec.schema import chain_schema

GOOD = """
from typing import Literal
from pydantic import BaseModel
from spec.fields import ByteSize
from spec.offloading import StoreSpec

class Shape(BaseModel):
    width: int

class Turns(BaseModel, extra="forbid"):
    count: int

class TapeSpec(StoreSpec):
    type: Literal["tape"] = "tape"
    reel: ByteSize
    shape: Shape | None = None
    turns: Shape | Turns | None = None

    def open(self, site):
        raise NotImplementedError
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Install a package: a module with some source, and entry points as `name = object`."""

    def install(module: str, source: str, **types: str) -> None:
        folder = tmp_path / module
        info = folder / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / f"{module}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        points = [f"{name} = {module}:{found}" for name, found in types.items()]
        (info / "entry_points.txt").write_text("\n".join(["[kvtiers.tiers]", *points]))
        monkeypatch.syspath_prepend(str(folder))

    return install


def chain(**tier: object) -> str:
    """The problems of a chain with this one tier, "" if there are none."""
    try:
        load_chain({"version": 1, "tiers": [tier]})
    except SpecError as error:
        return str(error)
    return ""


def test_our_own_types_are_installed_like_any() -> None:
    assert {"cpu", "disk", "redis"} <= set(tier_types())
    assert tier_class("cpu").__name__ == "CpuSpec"


def test_a_plugins_type_works_like_ours(plugin) -> None:  # type: ignore[no-untyped-def]
    plugin("tapes", GOOD, tape="TapeSpec")
    made = load_chain({"version": 1, "tiers": [{"type": "tape", "reel": "1GB"}]})
    assert made.tiers[0].tier_name == "tape" and made.tiers[0].reel == 10**9  # type: ignore[attr-defined]
    assert chain(type="tape", rell="1GB") == (
        "chain: tiers[0].rell: found an unknown key; did you mean reel?"
    )
    assert "tiers[0].shape.width: found nothing; add width" in chain(type="tape", reel=1, shape={})
    union = chain(type="tape", reel=1, turns={"cuont": 1}).splitlines()
    assert "chain: tiers[0].turns.cuont: found an unknown key; remove it" in union
    schema = chain_schema()
    assert schema["$defs"]["tape"]["properties"]["shape"]["anyOf"][0] == {
        "$ref": "#/$defs/tape.Shape"
    }
    assert "tape.Shape" in schema["$defs"]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def broken(:", "SyntaxError"),
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("", "has no attribute 'TapeSpec'"),
        ("TapeSpec = 3", "not an OffloadingSpec"),
        ("class TapeSpec: ...", "not an OffloadingSpec"),
        (GOOD.replace("def open", "def opened"), "does not implement open"),
    ],
)
def test_a_broken_plugin_troubles_only_those_who_use_it(
    plugin,  # type: ignore[no-untyped-def]
    source: str,
    says: str,
    request: pytest.FixtureRequest,
) -> None:
    module = f"broken{request.node.callspec.indices['source']}"
    plugin(module, source, tape="TapeSpec")
    assert chain(type="cpu", capacity="1GiB") == ""
    assert "tape" not in chain_schema()["$defs"]
    told = chain(type="tape")
    assert told.startswith(f"chain: tiers[0].type: found 'tape'; its package {module} is broken")
    assert says in told and "\n" not in told


def test_a_type_that_two_packages_provide_is_nobodys(plugin) -> None:  # type: ignore[no-untyped-def]
    plugin("mydisk", GOOD, disk="TapeSpec")
    assert "several packages provide it: kvtiers, mydisk" in chain(type="disk")
    assert chain(type="cpu", capacity=1) == ""


def test_a_class_that_is_not_of_its_type_is_told_so(plugin) -> None:  # type: ignore[no-untyped-def]
    plugin("misnamed", GOOD, film="TapeSpec")
    assert "its class is of type tape" in chain(type="film", reel=1)


@pytest.mark.parametrize(
    ("written", "says"),
    [("dsk", "did you mean disk?"), ("Redis", "did you mean redis?"), ("s3", "use one of cpu, ")],
)
def test_an_unknown_type_is_answered_with_the_known(written: str, says: str) -> None:
    assert says in chain(type=written)
