"""The versions of vLLM we claim: their signatures are met, and every other is refused clearly."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.engine.record import by_class, facts, imported, versions
from tiers.engine.versions import NEWEST, OLDEST, SUPPORTED, UnsupportedEngine, check_version

ROOT = Path(__file__).parent.parent.parent
RECORDED = versions()
LEFT_TO_THE_BASE = {"role"}
"""What vLLM's base class does well for ours, in every version."""


def of_ours(classes: tuple[type, ...]) -> dict[str, Any]:
    """Members that classes have of us, not of vLLM; those of a role from the half of that role."""
    ours = [
        base
        for cls in classes
        for base in reversed(cls.__mro__)
        if base.__module__.startswith("tiers.")
    ]
    return {
        name: member
        for base in ours
        for name, member in vars(base).items()
        if getattr(member, "__name__", "") != "_another_roles"
    }


def classes() -> dict[str, tuple[type, ...]]:
    """Our classes for each of vLLM's that it derives from."""
    from tiers.engine import vllm, vllm_offloading, vllm_stats

    return {
        "KVConnectorBase_V1": tuple(vllm.HALVES.values()),
        "KVConnectorStats": (vllm_stats.MultiKVConnectorStats,),
        "KVConnectorPromMetrics": (vllm_stats.KVTiersPromMetrics,),
        "TieringOffloadingManager": (vllm_offloading.HostedManager,),
        "TieringOffloadingSpec": (vllm_offloading.KVTiersOffloadingSpec,),
        "SecondaryTierManager": (vllm_offloading.KVTiersStore,),
    }


def test_each_minor_version_of_the_range_is_recorded() -> None:
    recorded = [tuple(int(n) for n in version.split(".")[:2]) for version in RECORDED]
    assert recorded == [(0, minor) for minor in range(OLDEST[1], NEWEST[1] + 1)]


@pytest.mark.vllm
@pytest.mark.parametrize("version", RECORDED)
def test_our_classes_are_what_the_version_calls(version: str) -> None:
    bases = by_class(facts(version)["bases"])
    assert bases.keys() == classes().keys()
    for name, ours_of in classes().items():
        ours, members = of_ours(ours_of), bases[name]
        assert members, f"{name} was not found when this was recorded"
        abstract = {member[1:] for member in members if member.startswith("!")}
        if name == "KVConnectorBase_V1":
            everything = {member.removeprefix("!") for member in members}
            assert everything - ours.keys() == LEFT_TO_THE_BASE
        assert abstract <= ours.keys()
        for member, parameters in members.items():
            mine = ours.get(member.removeprefix("!"))
            if mine is not None and parameters is not None:
                takes_all(f"{name}.{member}", mine, parameters.split())


def takes_all(name: str, mine: Any, parameters: list[str]) -> None:
    """Fail unless a call with these parameters, by place or `=name`, is taken."""
    function = mine.__func__ if isinstance(mine, classmethod) else mine
    by_place = [p for p in parameters if not p.startswith("=")]
    by_name = {p[1:]: None for p in parameters if p.startswith("=")}
    signature = inspect.signature(function)
    signature.bind("self", *by_place, **by_name)
    signature.bind("self", **dict.fromkeys(by_place), **by_name)
    needed = [p.name for p in signature.parameters.values() if p.default is p.empty]
    assert {*needed[1:]} - {"kwargs"} <= {*by_place, *by_name}, name


@pytest.mark.parametrize("version", RECORDED)
def test_all_that_we_import_is_there(version: str) -> None:
    names = {module: (text or "").split() for module, text in facts(version)["names"].items()}
    missing = [f"{m}.{name}" for m, name in imported() if name not in names.get(m, [])]
    assert not missing, "not in this version, or imported since it was recorded (see record.py)"


CHANGES_NOTHING = {
    "get_model": "returns it",
    "compute_weight_checksums": "reads",
    "supports_draft_weight_updates": "says",
    "init_weight_transfer_engine": "update_weights follows",
    "start_weight_update": "as does it there",
    "shutdown_weight_transfer_engine": "ends a connection",
    "start_draft_weight_update": "drafts make no wrong tokens",
}
"""Members of a worker that have to do with weights, and why their calls are not counted."""


@pytest.mark.vllm
@pytest.mark.parametrize("version", RECORDED)
def test_what_we_wrap_is_there_and_is_all(version: str) -> None:
    from tiers.engine.model_weights import WEIGHT_CHANGERS

    wrapped = by_class(facts(version)["wrapped"])
    assert wrapped.pop("LRUCacheWorkerLoRAManager") == {"add_adapter": "lora_request"}
    assert wrapped.pop("EngineCore") == {"collective_rpc": "method timeout args kwargs"}
    assert wrapped.pop("TritonAttentionImpl") == {"_ensure_scale_caches": "kv_cache"}
    loads = wrapped.pop("OffloadingConnectorScheduler")
    assert loads["update_state_after_alloc"] == "request blocks num_external_tokens"
    asked = loads["get_num_new_matched_tokens"]
    assert asked is not None and asked.split()[:2] == ["request", "num_computed_tokens"]
    worker = wrapped.pop("Worker").keys()
    assert worker - CHANGES_NOTHING.keys() <= {*WEIGHT_CHANGERS}, (
        "may change weights, and is not counted"
    )
    assert {*WEIGHT_CHANGERS} - worker <= {"reset_weights"}, "vLLM before 0.32 has no such one"
    for name, members in wrapped.items():
        assert members.keys() == {"reset_prefix_cache"}, name


@pytest.mark.vllm
def test_vllm_says_whose_kv_has_a_scale_for_each_token_and_head() -> None:
    """Else those scales are filled by the first step, behind what was loaded; see `fill_scales`."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    assert "self._is_per_token_head_quant = " in inspect.getsource(TritonAttentionImpl.__init__)


@pytest.mark.parametrize("version", ["0.29.0", "0.30.1", "0.33.0", "0.33.1.dev7+gabc.cpu"])
def test_a_version_of_the_range_is_served(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        ("0.28.0", "a newer vLLM"),
        ("0.9.2", "a newer vLLM"),
        ("0.34.0", "a newer kvtiers"),
        ("1.0.0", "a newer kvtiers"),
        ("dev", "a release of vLLM"),
    ],
)
def test_any_other_is_refused_and_told_what_would_do(version: str, remedy: str) -> None:
    with pytest.raises(UnsupportedEngine) as refusal:
        check_version(version)
    text = str(refusal.value)
    assert f"kvtiers serves vLLM {SUPPORTED} and found {version!r}" in text
    assert remedy in text and '"vllm>=0.29,<0.34"' in text


@pytest.mark.parametrize("module", ["tiers.engine.vllm", "tiers.engine.vllm_offloading"])
def test_it_is_told_so_even_where_nothing_else_can_be_imported(module: str, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text('__version__ = "0.8.5"\n')
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert f"UnsupportedEngine: kvtiers serves vLLM {SUPPORTED}" in done.stderr.splitlines()[-1]


def test_package_and_readme_state_the_same_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["vllm"] == [f"vllm>=0.{OLDEST[1]},<0.{NEWEST[1] + 1}"]
    readme = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    assert f"Supported: vLLM {SUPPORTED}" in readme
