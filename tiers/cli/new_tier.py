"""`kvtiers new-tier`: the start of a tier of your own, which works and is to be changed into it."""

from __future__ import annotations

import keyword
import re
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from tiers.cli.arguments import refused

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


def new_tier(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tier type, like my-tier.")],
    folder: Annotated[
        Path | None, typer.Option(help="Write it here; by default into kvtiers-NAME.")
    ] = None,
) -> None:
    """Write a Python package with a tier that works, its tests, CI and a chain.

    \b
    kvtiers new-tier my-tier
    """
    from spec.registry import tier_types

    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise refused(f"{name!r}: write small letters, digits and hyphens, like my-tier")
    if name in tier_types():
        raise refused(f"{name}: an installed package provides this tier type; take another name")
    place = folder or Path(f"kvtiers-{name}")
    if place.exists():
        raise refused(f"{place}: it is there already")
    for path in write_tier(name, place):
        typer.echo(str(path))
    typer.echo(f"next: cd {place} && pip install -e '.[test]' && pytest && kvtiers try chain.yaml")


def write_tier(name: str, folder: Path) -> list[Path]:
    """Write a distribution for the tier type `name` into a folder, and return its files. Raises
    OSError."""
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
