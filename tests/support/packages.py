"""The packages of the environment, which no test changes."""

from __future__ import annotations

import sysconfig
from importlib.metadata import Distribution, EntryPoints, PathDistribution, entry_points
from typing import Any


def read_once() -> None:
    """Each tier of each chain is looked for among the entry points of all installed packages, in
    200 files: let those of the environment be read once. What is elsewhere is read each time."""
    really: Any = vars(Distribution)["entry_points"].fget
    kept: dict[str, EntryPoints] = {}
    environment = sysconfig.get_path("purelib")

    def of(package: Any) -> EntryPoints:
        place = str(package._path)
        if not place.startswith(environment):
            return really(package)  # type: ignore[no-any-return]
        if place not in kept:
            kept[place] = really(package)
        return kept[place]

    PathDistribution.entry_points = property(of)  # type: ignore[assignment]
    entry_points()
