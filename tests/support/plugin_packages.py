"""Plugins as they are installed: a module, and the metadata of a package that names its types."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Install(Protocol):
    """The fixture `plugin`: install a module's source, with types as `name="Class"`."""

    def __call__(self, module: str, source: str, /, **types: str) -> None: ...


def write_package(
    folder: Path, module: str, source: str, /, group: str = "kvtiers.tiers", **types: str
) -> Path:
    """Write a package, called as its module, into a folder of its own, for `sys.path`."""
    place = folder / module
    info = place / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (place / f"{module}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    points = [f"{name} = {module}:{found}" for name, found in types.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *points]))
    return place
