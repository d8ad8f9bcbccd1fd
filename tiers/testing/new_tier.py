"""`kvtiers new-tier`: writes a distribution with a tier that works, to be changed into another."""

from __future__ import annotations

import keyword
import re
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from tiers.errors import KVTiersError

TEMPLATE = "tiers.testing.template"
FILES = {
    "pyproject.toml": "pyproject.toml.in",
    "README.md": "README.md.in",
    ".github/workflows/test.yml": "test.yml.in",
    "chain.yaml": "chain.yaml.in",
    "{package}/__init__.py": "__init__.py",
    "{package}/store.py": "store.py",
    "{package}/spec.py": "spec.py",
    "tests/test_{package}.py": "kit.py",
}
"""What is written, and the file of the template that it is made of."""

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_PAGE = "https://pypi.org/project/kvtiers"


class CannotWrite(KVTiersError):
    """There can be no such distribution, or not there."""


def write_tier(name: str, folder: Path) -> list[Path]:
    """Write a distribution for the tier type `name` into a folder that is not there yet, and return
    its files. Raises CannotWrite and OSError."""
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise CannotWrite(f"{name!r}: write small letters, digits and hyphens, like my-tier")
    if folder.exists():
        raise CannotWrite(f"{folder}: it is there already")
    package = f"{name.replace('-', '_')}_tier"
    made = []
    for place, source in FILES.items():
        path = folder / place.format(package=package)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = files(TEMPLATE).joinpath(source).read_text(encoding="utf-8")
        path.write_text(_rendered(text, source, name, package), encoding="utf-8")
        made.append(path)
    return made


def _rendered(text: str, source: str, name: str, package: str) -> str:
    title = "".join(part.capitalize() for part in name.split("-"))
    if source == "__init__.py":
        return f'"""The tier type {name} of kvtiers."""\n'
    if source.endswith(".in"):
        least = ".".join(version("kvtiers").split(".")[:2])
        for word, meant in (("VERSION", least), ("PACKAGE", package), ("PAGE", _PAGE)):
            text = text.replace(word, meant)
        return text.replace("CLASS", title).replace("NAME", name)
    text = text.replace(TEMPLATE, package).replace("Template", title)
    return text.replace('"template"', f'"{name}"')
