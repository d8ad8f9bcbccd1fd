"""Tier types from entry points: ours, a plugin's, and plugins that are broken."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from spec import plugins
from spec.errors import SpecError
from spec.load import load_chain
from spec.offloading import HIT_SOURCES
from spec.registry import tier_class, tier_types
from spec.schema import chain_schema
from tests.support.plugin_packages import Install, write_package

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


def test_a_plugins_type_works_like_ours(plugin: Install) -> None:
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
    ],
)
def test_a_broken_plugin_troubles_only_those_who_use_it(
    plugin: Install,
    source: str,
    says: str,
    request: pytest.FixtureRequest,
) -> None:
    module = f"broken{request.node.callspec.indices['source']}"
    plugin(module, source, tape="TapeSpec")
    assert chain(type="cpu", capacity="1GiB") == ""
    assert "tape" not in chain_schema()["$defs"]
    told = chain(type="tape")
    assert told.startswith(
        f"chain: tiers[0].type: found 'tape'; its package {module} 1.0 is broken"
    )
    assert says in told and "\n" not in told


@pytest.mark.fault
@pytest.mark.parametrize(
    ("source", "needs"),
    [
        (
            "from spec.offloading import StoreSite",
            "cannot import name 'StoreSite' from 'spec.offloading'",
        ),
        ("import tiers.pool", "No module named 'tiers.pool'"),
        ("import spec.offloading as api\napi.StoreSite", "has no attribute 'StoreSite'"),
        (GOOD.replace("def open", "def opened"), "its class does not implement open"),
    ],
)
def test_a_plugin_of_another_version_is_told_what_it_misses(
    plugin: Install, source: str, needs: str, request: pytest.FixtureRequest
) -> None:
    module = f"older{request.node.callspec.indices['source']}"
    plugin(module, source, tape="TapeSpec")
    told = chain(type="tape")
    assert f"its package {module} 1.0 is broken, or made for another version than kvtiers" in told
    assert needs in told and "\n" not in told


HANGS = "import time\nfrom pydantic import field_serializer, field_validator\n" + GOOD
SLEEPS = "        time.sleep(3600)\n"


@pytest.mark.fault
@pytest.mark.parametrize(
    "member",
    [
        "    @field_validator('reel')\n    def _check(cls, value):\n",
        "    @field_serializer('reel')\n    def _write(self, value):\n",
        "    @property\n    def host_local(self):\n",
    ],
)
def test_a_plugin_that_hangs_in_its_settings_is_named(
    plugin: Install, member: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "ASK_SECONDS", 0.3)
    module = f"slow{request.node.callspec.indices['member']}"
    plugin(module, HANGS + member + SLEEPS, tape="TapeSpec")
    told = chain(type="tape", reel="1GB")
    assert f"its package {module} 1.0 is broken" in told
    assert "making its settings takes more than 0.3 s" in told


PRINTS = "import os\nprint('by print')\nos.write(1, b'by a library\\n')\n" + GOOD


@pytest.mark.fault
def test_what_a_plugin_prints_goes_to_stderr(
    plugin: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    plugin("prints", PRINTS, tape="TapeSpec")
    print("before")
    assert chain(type="tape", reel="1GB") == ""
    print("after")
    out, err = capfd.readouterr()
    assert out.split("\n") == ["before", "after", ""]
    assert "by print\n" in err and "by a library\n" in err


def test_a_type_that_two_packages_provide_is_nobodys(plugin: Install) -> None:
    plugin("onetape", GOOD, tape="TapeSpec")
    plugin("twotapes", GOOD, tape="TapeSpec")
    assert "several packages provide it: onetape 1.0, twotapes 1.0" in chain(type="tape")
    assert chain(type="cpu", capacity=1) == ""


@pytest.mark.fault
def test_a_name_of_ours_is_nobody_else_s(plugin: Install, caplog: pytest.LogCaptureFixture) -> None:
    plugin("mydisk", GOOD, disk="TapeSpec", cpu="TapeSpec")
    for _ in range(2):
        assert chain(type="disk", capacity=1 << 20, path="/somewhere") == ""
    (line,) = [line for line in caplog.messages if "type disk" in line]
    assert line == (
        "the tier type disk is kvtiers' own; the one that the package mydisk 1.0 provides is not "
        "used"
    )


BROKEN = GOOD.replace("reel: ByteSize", "reel: ByteSize\n    rails: list[int] = []")
CHECKS = """
    @field_validator("reel", mode="after")
    @classmethod
    def _check(cls, value):
        raise {}
"""


def checked(error: str) -> str:
    head = "import decimal\nfrom pydantic import field_validator, field_serializer\n"
    return head + BROKEN + CHECKS.format(error)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("class Odd(Exception): ...\nraise Odd('no licence')", "Odd: no licence"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
        ("class Odd(BaseException): ...\nraise Odd", "Odd"),
        (
            "class Mute(Exception):\n    def __str__(self): raise TypeError\nraise Mute",
            "Mute",
        ),
        ("import time\ntime.sleep(3600)", "its import takes more than 0.3 s"),
        (checked("KeyError('x')"), "making its settings raised KeyError: 'x'"),
        (checked("decimal.InvalidOperation()"), "making its settings raised InvalidOperation"),
        (checked("SystemExit(1)"), "making its settings raised SystemExit: 1"),
        (BROKEN + "    identity = ('rails', 'reels')", "identity has 'reels', which is none of"),
        (BROKEN + "    identity = 'reel'", "identity has 'r', which is none of its fields"),
        (
            BROKEN + "    @property\n    def identity(self): return ('reel',)",
            "'property' object is not iterable",
        ),
        (BROKEN + "    identity = 7", "TypeError"),
        (
            BROKEN + "    @property\n    def host_local(self): return self.no",
            "making its settings raised AttributeError",
        ),
        (GOOD.replace("StoreSpec", "HostSpec"), "it is a HostSpec, which runs unguarded"),
        (BROKEN + "    hit_source = 'sqlite'", "its hit_source is 'sqlite'; use one of device, h"),
        (BROKEN + "    hit_source = ['disk']", "its hit_source is ['disk']"),
        (
            "from pydantic import field_serializer\n"
            + BROKEN
            + "    @field_serializer('reel')\n    def _w(self, value): raise ArithmeticError('w')",
            "ArithmeticError: w",
        ),
    ],
)
def test_whatever_a_plugin_does_its_package_is_named(
    plugin: Install,
    source: str,
    says: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugins, "IMPORT_SECONDS", 0.3 if "sleep" in source else 30.0)
    module = f"odd{request.node.callspec.indices['source']}"
    plugin(module, source, tape="TapeSpec")
    told = chain(type="tape", reel="1GB")
    assert f"tiers[0].type: found 'tape'; its package {module} 1.0 is broken" in told
    assert says in told and "\n" not in told
    assert chain(type="cpu", capacity="1GiB") == ""
    left_out: list[str] = []
    assert "cpu" in chain_schema(left_out.append)["$defs"]
    assert all(module in line for line in left_out)


@pytest.mark.parametrize(
    ("member", "says"),
    [
        ("loads_at_once: int | None = None", "no engine can use its loads_at_once, None"),
        ("loads_at_once: int = 5000", "its loads_at_once, 5000"),
        ("store_threshold: str = 'x'", "its store_threshold, 'x'"),
        ("admission: str = 'nope'", "its admission, 'nope'"),
        ("max_inflight: str = 'x'", "its max_inflight, 'x'"),
        ("write_budget: str = 'x'", "its write_budget, 'x'"),
        ("deadline: float = -1.0", "its deadline, -1.0"),
        ("encryption: bool = True", "its encryption, True"),
        ("name: str = 'a b'", "its name, 'a b'"),
        ("identity: str = 'abc'", "its field identity has the name of what every tier's class has"),
        ("tier_name: str = 'abc'", "its field tier_name has the name of"),
        ("is_prompt = 7", "its is_prompt, 7"),
        ("@property\n    def is_prompt(self): raise OSError('x')", "raised OSError: x"),
        ("@property\n    def may_store(self): raise OSError('x')", "raised OSError: x"),
        ("@property\n    def host_local(self): return 'maybe'", "its host_local, 'maybe'"),
        ("@property\n    def notes_folder(self): return 7", "its notes_folder, 7"),
        ("@property\n    def tier_name(self): raise OSError('x')", "raised OSError: x"),
        (
            "@model_validator(mode='wrap')\n    def _w(cls, value, _): return Shape(width=1)",
            "its validator made a Shape of it",
        ),
    ],
)
def test_what_no_engine_could_use_is_refused_before_it_starts(
    plugin: Install, member: str, says: str, request: pytest.FixtureRequest
) -> None:
    module = f"own{request.node.callspec.indices['member']}"
    head = "from typing import ClassVar\nfrom pydantic import model_validator\n"
    member = member.replace("is_prompt =", "is_prompt: ClassVar[object] =")
    plugin(module, f"{head}{GOOD}\n    {member}\n", tape="TapeSpec")
    told = chain(type="tape", reel="1GB")
    assert f"its package {module} 1.0 is broken" in told and says in told and "\n" not in told


def test_a_key_of_ours_may_have_another_default(plugin: Install) -> None:
    """And a flag of the class may be a field, as it is with `: bool`."""
    more = "    deadline: float = 0.5\n    loads_at_once: int = 8\n    write_budget: float = 1e9\n"
    plugin("faster", f"{GOOD}{more}    resizes: bool = True\n", tape="TapeSpec")
    assert chain(type="tape", reel="1GB") == ""


def test_a_type_may_have_any_characters(plugin: Install) -> None:
    plugin("plus", GOOD.replace("tape", "s3+tape"), **{"s3+tape": "TapeSpec"})
    assert chain(type="s3+tape", reel="1GB") == ""


def test_an_entry_point_that_names_no_class_is_told_how(plugin: Install, tmp_path: Path) -> None:
    plugin("noclass", GOOD, tape="TapeSpec")
    points = tmp_path / "noclass" / "noclass-1.0.dist-info" / "entry_points.txt"
    points.write_text("[kvtiers.tiers]\ntape = noclass TapeSpec\n")
    told = chain(type="tape", reel="1GB")
    assert "(noclass TapeSpec: its entry point is not module:Class)" in told


def test_a_schema_tells_what_it_leaves_out(plugin: Install) -> None:
    plugin("nolicence", "raise RuntimeError('no licence')", tape="TapeSpec")
    said: list[str] = []
    chain_schema(said.append)
    assert len(said) == 1 and "tape is left out: its package nolicence 1.0 is broken" in said[0]


def test_settings_that_no_schema_describes_are_left_out_and_can_be_used(plugin: Install) -> None:
    source = GOOD.replace(
        "class Shape", "import re\nfrom typing import Callable\nclass Shape"
    ).replace("reel: ByteSize", "reel: ByteSize\n    wind: Callable[[int], int] | None = None")
    plugin("callables", source, tape="TapeSpec")
    assert chain(type="tape", reel="1GB") == ""
    assert "add reel" in chain(type="tape")
    said: list[str] = []
    assert "tape" not in chain_schema(said.append)["$defs"]
    assert "callables" in said[0]


def test_places_that_can_t_be_hashed_are_compared(plugin: Install) -> None:
    plugin("railed", BROKEN + "    identity = ['rails']", tape="TapeSpec")
    tiers = [{"type": "tape", "reel": 1, "rails": rails} for rails in ([1], [2], [1])]
    load_chain({"version": 1, "tiers": tiers[:2]})
    with pytest.raises(SpecError, match=r"tiers\[0\] keeps its blocks in the same place"):
        load_chain({"version": 1, "tiers": tiers})


def test_hit_sources_are_those_of_vllm() -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    # Read, since to import it takes twenty seconds.
    file = Path(found.origin).parent / "v1" / "metrics" / "cache_hit_source.py"
    tree = ast.parse(file.read_text())
    (source,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    values = [
        n.value.value
        for n in source.body
        if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant)
    ]
    assert list(HIT_SOURCES) == values


@pytest.mark.parametrize(
    ("written", "says"),
    [("dsk", "did you mean disk?"), ("Redis", "did you mean redis?"), ("s3", "use one of cpu, ")],
)
def test_an_unknown_type_is_answered_with_the_known(written: str, says: str) -> None:
    assert says in chain(type=written)


def test_a_plugin_of_another_api_is_named_before_its_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = write_package(
        tmp_path, "tapes", "raise SystemExit", group="kvtiers.tiers.v2", tape="TapeSpec"
    )
    monkeypatch.syspath_prepend(str(place))
    assert chain(type="tape") == (
        "chain: tiers[0].type: found 'tape'; its package tapes 1.0 was built for plugin API 2, "
        "this is 1: see docs/plugins.md#what-is-public-and-for-how-long"
    )


def test_of_two_versions_in_one_package_the_one_that_is_read_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = write_package(tmp_path, "tapes", GOOD, tape="TapeSpec")
    with (place / "tapes-1.0.dist-info" / "entry_points.txt").open("a") as points:
        points.write("\n[kvtiers.tiers.v2]\ntape = later:TapeSpec\n[kvtiers.tiers.x]\na = b:c\n")
    monkeypatch.syspath_prepend(str(place))
    assert tier_class("tape").__module__ == "tapes"
    assert "a" not in tier_types()


def test_a_package_that_comes_while_a_process_runs_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "tape" not in tier_types()
    package = write_package(tmp_path / "built", "tapes", GOOD, tape="TapeSpec")
    for part in package.iterdir():
        part.rename(tmp_path / part.name)
    assert tier_class("tape").__module__ == "tapes"
