"""Each environment variable of vLLM is in the key, or is known to be irrelevant."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.engine.needless_variables import NEEDLESS
from tests.engine.record import facts, variables_in, versions
from tiers.engine.identity.config_fields import VARIABLES
from tiers.engine.identity.facts import layer_facts, variable_facts

NAMES = {name for names in NEEDLESS.values() for name in names.split()}


def unknown(names: Iterable[str]) -> list[str]:
    """Variables that are in neither table."""
    return [name for name in names if name not in NAMES and not name.startswith(VARIABLES)]


@pytest.mark.parametrize("version", versions())
def test_the_tables_have_all_variables_of_the_version(version: str) -> None:
    recorded = facts(version)["variables"]
    assert len(recorded) > 300 and unknown(recorded) == []


@pytest.mark.vllm
def test_the_tables_have_all_variables_of_the_installed_version() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    module = ast.parse(Path(spec.origin).with_name("envs.py").read_text())
    found = variables_in(module)
    assert len(found) > 300 and unknown(found) == []


def test_a_new_variable_is_found() -> None:
    text = "environment_variables: dict = {'VLLM_PORT': port, 'VLLM_COLOUR': colour}"
    assert unknown(variables_in(ast.parse(text))) == ["VLLM_COLOUR"]


def test_the_tables_have_nothing_that_no_version_has() -> None:
    recorded = {name for version in versions() for name in facts(version)["variables"]}
    assert recorded >= NAMES
    assert [start for start in VARIABLES if not any(n.startswith(start) for n in recorded)] == []
    assert not [name for name in NAMES if name.startswith(VARIABLES)], "one place each"


def test_what_decides_how_coarsely_vllm_computes_is_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=8192),
        compilation_config=SimpleNamespace(static_forward_context={}),
        device_config=SimpleNamespace(device_type="cpu"),
    )
    before = layer_facts(config, None)
    for name, value in (("VLLM_MARLIN_INPUT_DTYPE", "int8"), ("VLLM_CPU_INT4_W4A8", "0")):
        monkeypatch.setenv(name, value)
        after = layer_facts(config, None)
        assert after != before
        before = after
    monkeypatch.setenv("VLLM_PORT", "1")
    assert layer_facts(config, None) == before


def test_what_is_not_set_and_what_kubernetes_sets_changes_no_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kubernetes names variables after services, such as one called vllm-rocm."""
    for name in ("VLLM_LOGGING_LEVEL", "VLLM_ROCM_SERVICE_HOST", "VLLM_ROCM_PORT_80_TCP_ADDR"):
        monkeypatch.setenv(name, "10.0.0.1")
    assert variable_facts() == {}


@pytest.mark.vllm
def test_weights_of_another_hub_are_not_looked_for_in_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tiers.engine.vllm_identity import _hub_folder

    load = SimpleNamespace(download_dir="/models")
    assert _hub_folder(load) == Path("/models")
    for said in ("True", "1"):
        monkeypatch.setenv("VLLM_USE_MODELSCOPE", said)
        assert _hub_folder(load) is None
