"""Imports point down: `spec` knows no tier, rooms know those below, one file knows vLLM."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests import figures

ROOT = Path(__file__).parent.parent
LEAVES = {"gpu", "cpu", "disk", "remote"}
FOLDERS = {p.name for p in (ROOT / "tiers").iterdir() if (p / "__init__.py").exists()}
MODULES = sorted(
    p.relative_to(ROOT) for part in ("spec", "tiers") for p in (ROOT / part).rglob("*.py")
)
HEAVY = {
    "torch",
    "vllm",
    "lmdb",
    "redis",
    "zstandard",
    "prometheus_client",
    "numpy",
    "transformers",
}
KNOW_VLLM = {
    "tiers/engine/vllm.py": "the adapter",
    "tiers/engine/vllm_children.py": "a part of it: vLLM's connectors as children of ours",
    "tiers/engine/vllm_events.py": "a part of it: KV events",
    "tiers/engine/vllm_groups.py": "a part of it: KV cache groups",
    "tiers/engine/vllm_settings.py": "its configuration, for the doctor",
    "tiers/engine/vllm_stats.py": "a part of it: stats and metrics",
    "tiers/engine/vllm_watch.py": "a part of it: resets, weights, adapters and sleep",
    "tiers/engine/vllm_offloading.py": "our tiers under a connector of vLLM's own",
    "tiers/engine/vllm_secondary_tier.py": "a part of that: a store as a tier of vLLM's",
    "tiers/engine/vllm_hosting.py": "a part of that: whose KV it is",
    "tiers/engine/plugin.py": "registers the adapter, in a process that is vLLM's own",
}


@cache
def imports(path: Path, only_at_import: bool = False, for_types: bool = False) -> tuple[str, ...]:
    """Dotted names that a module imports, also in functions unless `only_at_import`, and those for
    type checkers alone if `for_types`.

    `from a import b` gives a.b, since b may be a module.
    """
    return tuple(_imports(_parsed(path), only_at_import, for_types))


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def _imports(node: ast.AST, only_at_import: bool, for_types: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        is_for_types = (
            isinstance(child, ast.If)
            and isinstance(child.test, ast.Name)
            and child.test.id == "TYPE_CHECKING"
        )
        if is_for_types and not for_types:
            continue
        if only_at_import and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute here"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        yield from _imports(child, only_at_import, for_types)


ROOMS: dict[str, set[str]] = {
    "host": {"concurrency"},
    "concurrency": set(),
    "wrappers": {"host", "concurrency"},
    **{leaf: {"host", "concurrency"} for leaf in LEAVES},
    "contract": {"wrappers", "host", "concurrency"},
    "explain": {"contract", "concurrency"},
    "loading": set(),
    "control": {
        "connector/multi",
        "connector/scheduler",
        "contract",
        "explain",
        "host",
        "concurrency",
    },
    "connector/policy": {"contract", "explain", "concurrency", "loading"},
    "connector/scheduler": {
        "cpu",
        "loading",
        "contract",
        "connector/policy",
        "wrappers",
        "host",
        "concurrency",
    },
    "connector/worker": {"contract", "loading", "wrappers", "host", "concurrency"},
    "connector/multi": {
        "contract",
        "connector/policy",
        "explain",
        "concurrency",
        "loading",
    },
    "connector": {
        "contract",
        "connector/policy",
        "connector/scheduler",
        "connector/worker",
        "connector/multi",
        "traces",
        "explain",
        "ghosts",
        "wrappers",
        "host",
        "concurrency",
    },
    "engine": {
        "connector",
        "control",
        "contract",
        "connector/policy",
        "connector/scheduler",
        "connector/worker",
        "connector/multi",
        "gpu",
        "wrappers",
        "host",
        "concurrency",
    },
    "testing": {"cpu", "host"},
    "traces": {"concurrency"},
    "ghosts": {"concurrency"},
    "tuning": {"traces", "loading", "host"},
    "tuning/profiling": {"tuning", "wrappers", "host"},
    "lab": {
        "tuning",
        "traces",
        "connector",
        "contract",
        "connector/multi",
        "connector/policy",
        "connector/scheduler",
        "connector/worker",
        "testing",
        "gpu",
        "disk",
        "remote",
        "host",
    },
    "data": {"wrappers", "host", "concurrency"},
    "doctor": {"control", "engine", "contract", "wrappers", "host", "concurrency"},
    "cli": {
        "data",
        "doctor",
        "engine",
        "lab",
        "traces",
        "tuning",
        "tuning/profiling",
        "explain",
        "control",
        "testing",
    },
}
"""Which rooms of `tiers` each room may import from; `connector` itself is its files that assemble
the others. All may import the files that lie in `tiers` itself."""


def room(name: str) -> str | None:
    """The room of `tiers` that a dotted name or a module's path lies in."""
    parts = name.removesuffix(".py").replace("/", ".").split(".")
    if parts[0] != "tiers":
        return None
    inner = "/".join(parts[1:3])
    return inner if inner in ROOMS else parts[1] if parts[1] in FOLDERS else None


def may_import(importer: str, imported: str) -> bool:
    """Whether a file may import a name of ours."""
    if importer.startswith("spec/"):
        return imported.startswith("spec.")
    here, there = room(importer), room(imported)
    if there is None or there == here:
        return True
    return there in ROOMS.get(here or "", set())


def test_every_folder_is_a_room() -> None:
    assert {name.partition("/")[0] for name in ROOMS} == FOLDERS
    connector = ROOT / "tiers" / "connector"
    inner = {f"connector/{p.name}" for p in connector.iterdir() if (p / "__init__.py").exists()}
    assert inner == {name for name in ROOMS if name.startswith("connector/")}


def test_no_circle_of_imports() -> None:
    """Neither of files nor of folders that lie side by side, at any depth of the house; imports in
    functions and for type checkers alone count, too."""
    assert figures.knots() == set()


def test_a_folder_circle_is_one_although_no_file_is_on_one() -> None:
    down = ("tiers", "a", "low.py"), ("tiers", "b", "c", "top.py")
    back = ("tiers", "b", "d.py"), ("tiers", "a", "e.py")
    assert figures.on_circles(figures.beside([down])) == set()
    assert figures.on_circles(figures.beside([down, back])) == {"tiers/a", "tiers/b"}


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_point_down(module: Path) -> None:
    found = imports(module, for_types=str(module).startswith("spec/"))
    ours = [name for name in found if name.split(".")[0] in ("spec", "tiers")]
    assert [name for name in ours if not may_import(str(module), name)] == []


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("spec/chain.py", "tiers.errors", False),
        ("spec/chain.py", "spec.fields", True),
        ("tiers/wrappers/guard.py", "tiers.disk.disk_store", False),
        ("tiers/wrappers/guard.py", "tiers.store.TierStore", True),
        ("tiers/disk/disk_store.py", "tiers.cpu.residency", False),
        ("tiers/disk/disk_store.py", "tiers.disk.slab", True),
        ("tiers/remote/redis/redis_store.py", "tiers.contract.messages", False),
        ("tiers/connector/assembly.py", "tiers.gpu.copier", False),
        ("tiers/connector/assembly.py", "tiers.wrappers.guard", True),
        ("tiers/contract/engine_info.py", "tiers.connector.policy.choice", False),
        ("tiers/connector/policy/choice.py", "tiers.contract.block_groups", True),
        ("tiers/connector/multi/multi_connector.py", "tiers.connector.scheduler.jobs", False),
        ("tiers/connector/worker/offloading_worker.py", "tiers.connector.scheduler.jobs", False),
        ("tiers/engine/vllm.py", "tiers.disk.disk_store", False),
        ("tiers/engine/vllm.py", "tiers.gpu.copier", True),
        ("tiers/cli/main.py", "tiers.disk.spec", False),
    ],
)
def test_the_rule_itself(importer: str, imported: str, allowed: bool) -> None:
    assert may_import(importer, imported) is allowed


def test_spec_needs_only_pydantic_and_yaml() -> None:
    allowed = {"spec", "pydantic", "pydantic_core", "yaml", *sys.stdlib_module_names}
    modules = [module for module in MODULES if module.parts[0] == "spec"]
    roots = {name.split(".")[0] for module in modules for name in imports(module)}
    assert roots - allowed == set()


def test_vllm_is_imported_in_one_place() -> None:
    users = {str(m) for m in MODULES if any(n.split(".")[0] == "vllm" for n in imports(m))}
    assert users <= set(KNOW_VLLM)
    at_import = {
        str(m)
        for m in MODULES
        if any(n.split(".")[0] == "vllm" for n in imports(m, only_at_import=True))
    }
    assert at_import == {m for m in KNOW_VLLM if m.startswith("tiers/engine/vllm")}


def test_nothing_is_unpickled() -> None:
    banned = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    users = [str(m) for m in MODULES if banned & {n.split(".")[0] for n in imports(m)}]
    assert users == []


def test_threads_begin_by_one_function() -> None:
    makers = {str(m) for m in MODULES if "threading.Thread(" in (ROOT / m).read_text()}
    ours = {maker for maker in makers if not maker.startswith(("spec/", "tiers/testing/"))}
    # The other ends a process beside the engine, which computes nothing.
    assert ours == {"tiers/concurrency/executors.py", "tiers/concurrency/beside.py"}


def test_specs_and_the_command_load_nothing_heavy() -> None:
    names = [str(m.with_suffix("")).replace("/", ".") for m in MODULES]
    light = [n for n in names if n.split(".")[0] == "spec" or n.endswith("spec") or ".cli." in n]
    assert {"tiers.remote.object_spec", "tiers.cli.main", "spec.load"} <= set(light)
    code = f"import sys, {', '.join(light)}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("", "")
