"""Tier types: what an entry of `tiers:` may have as its `type`, and the class behind it.

Each is an entry point of the group `kvtiers.tiers` in some installed package; ours register the
same way as a plugin's. A class is imported when its type is used, not before, so that a broken
plugin troubles nobody who doesn't use it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from spec.hints import did_you_mean, one_of
from spec.offloading import OffloadingSpec

GROUP = "kvtiers.tiers"

_IMPORT_FAULTS = (
    *(ImportError, SyntaxError, AttributeError, TypeError, ValueError, NameError),
    *(LookupError, OSError, RuntimeError, AssertionError),
)
"""What importing a module written by someone else may raise."""


class UnknownTierType(ValueError):
    """No installed package provides the type."""


class BrokenTierType(ValueError):
    """A package provides the type, but not a class that can be used."""


def tier_types() -> Mapping[str, tuple[EntryPoint, ...]]:
    """The installed types in alphabetical order; more than one entry point each is a clash."""
    found: dict[str, dict[str, EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        found.setdefault(entry.name, {}).setdefault(entry.value, entry)
    return {name: tuple(found[name].values()) for name in sorted(found)}


def tier_class(tier_type: str) -> type[OffloadingSpec]:
    """The class of a tier type. Raises UnknownTierType and BrokenTierType."""
    types = tier_types()
    if not types:
        raise UnknownTierType("no tier types are installed; install kvtiers with pip")
    if tier_type not in types:
        raise UnknownTierType(did_you_mean(tier_type, types) or f"use {one_of(types)}")
    if len(types[tier_type]) > 1:
        owners = ", ".join(sorted(map(_owner, types[tier_type])))
        raise BrokenTierType(f"several packages provide it: {owners}; uninstall all but one")
    (entry,) = types[tier_type]
    return _load(entry)


def _load(entry: EntryPoint) -> type[OffloadingSpec]:
    try:
        loaded: object = entry.load()
    except _IMPORT_FAULTS as error:
        raise _broken(entry, f"{type(error).__name__}: {error}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, OffloadingSpec)):
        raise _broken(entry, "it is not an OffloadingSpec")
    own = loaded.model_fields["type"].default
    if isinstance(own, str) and own != entry.name:
        raise _broken(entry, f"its class is of type {own}")
    if inspect.isabstract(loaded):
        missing = ", ".join(sorted(loaded.__abstractmethods__))
        raise _broken(entry, f"it does not implement {missing}")
    return loaded


def _broken(entry: EntryPoint, reason: str) -> BrokenTierType:
    return BrokenTierType(
        f"its package {_owner(entry)} is broken, repair or reinstall it ({entry.value}: {reason})"
    )


def _owner(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value
