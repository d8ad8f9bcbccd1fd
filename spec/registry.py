"""Tier types: the values of `type` in an entry of `tiers:`, and the class of each.

Each is an entry point of the group `kvtiers.tiers` in an installed package; ours register as a
plugin's do, and no other package can take their names. A class is imported when its type is used,
not before. If a plugin's code fails in any way, its package is reported as broken, by name; other
types still work.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from pydantic import ValidationError

from spec.errors import KVTiersError, told
from spec.hints import did_you_mean, one_of
from spec.offloading import HIT_SOURCES, OffloadingSpec, StoreSpec

GROUP = "kvtiers.tiers"

IMPORT_SECONDS = 30.0
"""Limit for the import of a plugin."""

_OURS = "tiers."
_log = logging.getLogger(__name__)

T = TypeVar("T")


class UnknownTierType(KVTiersError, ValueError):
    """No installed package provides the tier type."""


class BrokenTierType(KVTiersError, ValueError):
    """The package that provides the tier type is broken."""


def tier_types() -> Mapping[str, tuple[EntryPoint, ...]]:
    """Return the entry points of each installed type, sorted by type; several are a clash."""
    found: dict[str, dict[str, EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        found.setdefault(entry.name, {}).setdefault(entry.value, entry)
    return {name: _rightful(found[name].values()) for name in sorted(found)}


def _rightful(entries: Collection[EntryPoint]) -> tuple[EntryPoint, ...]:
    """Return our entry points if the name is ours, else all."""
    ours = tuple(entry for entry in entries if entry.value.startswith(_OURS))
    if not ours:
        return tuple(entries)
    for other in entries:
        if other not in ours:
            _say_taken(other.name, _owner(other))
    return ours


@functools.cache
def _say_taken(name: str, owner: str) -> None:
    _log.warning(
        "the tier type %s is kvtiers' own; the one that the package %s provides is not used",
        name,
        owner,
    )


def tier_class(tier_type: str) -> type[OffloadingSpec]:
    """Return the class of a tier type. Raises UnknownTierType and BrokenTierType."""
    return _load(_entry(tier_type))


def make_tier(tier_type: str, written: Mapping[object, object]) -> OffloadingSpec:
    """Make a tier's spec from an entry of the YAML.

    Raises UnknownTierType and BrokenTierType, and ValidationError for what is wrong with them.
    """
    entry = _entry(tier_type)
    spec = _load(entry)

    def make() -> OffloadingSpec:
        made = spec.model_validate(dict(written))
        made.model_dump(mode="json")  # as commands print it
        if isinstance(made, StoreSpec):
            _ = made.host_local  # as an engine that serves asks for it
        return made

    return _run(entry, make, "its settings can't be made")


def tier_parts(tier_type: str, make: Callable[[type[OffloadingSpec]], T]) -> T:
    """Return `make(class)` for a type's class. Raises UnknownTierType and BrokenTierType."""
    entry = _entry(tier_type)
    spec = _load(entry)
    return _run(entry, lambda: make(spec), "its settings can't be described")


def _entry(tier_type: str) -> EntryPoint:
    types = tier_types()
    if not types:
        raise UnknownTierType("no tier types are installed; install kvtiers with pip")
    if tier_type not in types:
        raise UnknownTierType(did_you_mean(tier_type, types) or f"use {one_of(types)}")
    if len(types[tier_type]) > 1:
        owners = ", ".join(sorted(map(_owner, types[tier_type])))
        raise BrokenTierType(f"several packages provide it: {owners}; uninstall all but one")
    (entry,) = types[tier_type]
    return entry


def _load(entry: EntryPoint) -> type[OffloadingSpec]:
    loaded = _run(entry, entry.load if entry.value.startswith(_OURS) else lambda: _import(entry))
    if not (isinstance(loaded, type) and issubclass(loaded, OffloadingSpec)):
        raise _broken(entry, "it is not an OffloadingSpec")
    _run(entry, lambda: _check(entry, loaded))
    return loaded


def _import(entry: EntryPoint) -> object:
    """Import a class on another thread, since the import may hang."""
    ended: Future[object] = Future()

    def load() -> None:
        try:
            ended.set_result(entry.load())
        except BaseException as error:  # noqa: BLE001 - raised where it was asked for
            ended.set_exception(error)

    threading.Thread(target=load, name=f"import {entry.value}", daemon=True).start()
    if not wait([ended], IMPORT_SECONDS).done:
        raise _broken(entry, f"its import takes more than {IMPORT_SECONDS:g} s")
    if (error := ended.exception()) is not None:
        raise _broken(entry, told(error)) from error
    return ended.result()


def _check(entry: EntryPoint, spec: type[OffloadingSpec]) -> None:
    """Check what would otherwise fail in the engine. Raises BrokenTierType."""
    own = spec.model_fields["type"].default
    if isinstance(own, str) and own != entry.name:
        raise _broken(entry, f"its class is of type {own}")
    if inspect.isabstract(spec):
        missing = ", ".join(sorted(spec.__abstractmethods__))
        raise _broken(entry, f"it does not implement {missing}")
    if spec.hit_source not in HIT_SOURCES:
        raise _broken(entry, f"its hit_source is {spec.hit_source!r}; use {one_of(HIT_SOURCES)}")
    if isinstance(spec.identity, str):
        raise _broken(entry, f"its identity is a text; write ({spec.identity!r},)")
    for field in spec.identity:
        if field not in spec.model_fields:
            raise _broken(entry, f"its identity has {field!r}, which is none of its fields")


def _run(entry: EntryPoint, ask: Callable[[], T], what: str = "") -> T:
    """Run a plugin's code. Raises ValidationError, and BrokenTierType for any other exception."""
    try:
        return ask()
    except (BrokenTierType, ValidationError):
        raise
    # Broad on purpose: a plugin's code may raise anything, ArithmeticError as well, and may exit.
    except (Exception, SystemExit) as error:
        reason = f"{what}: {told(error)}" if what else told(error)
        raise _broken(entry, reason) from error


def _broken(entry: EntryPoint, reason: str) -> BrokenTierType:
    return BrokenTierType(
        f"its package {_owner(entry)} is broken, repair or reinstall it ({entry.value}: {reason})"
    )


def _owner(entry: EntryPoint) -> str:
    name = entry.dist.name if entry.dist is not None else None
    return name or entry.value
