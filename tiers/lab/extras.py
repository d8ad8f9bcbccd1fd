"""Packages that a command needs beside kvtiers itself, checked before they are used."""

from __future__ import annotations

from importlib.util import find_spec

from tiers.errors import KVTiersError


class Missing(KVTiersError):
    """A package of one of kvtiers' extras is not installed."""


def require_extra(package: str, *extras: str) -> None:
    """Raise Missing, naming the extras that bring it, unless `package` can be imported."""
    if find_spec(package) is None:
        install = " or ".join(f"'kvtiers[{extra}]'" for extra in extras)
        raise Missing(f"{package} is not installed, which this needs: pip install {install}")
