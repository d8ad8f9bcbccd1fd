"""Tier types: the values of `type` in an entry of `tiers:`, and the class of each.

Each is an entry point of the group `kvtiers.tiers` in an installed package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from typing import TypeVar

from spec.errors import one_of
from spec.offloading import HIT_SOURCES, HostSpec, OffloadingSpec, StoreSpec
from spec.plugins import (
    OURS,
    TIERS,
    broken,
    check_whole,
    entries_of,
    entry_of,
    imported_class,
    installed,
    is_ours,
    owner,
    run,
)

T = TypeVar("T")


def tier_types() -> Mapping[str, tuple[EntryPoint, ...]]:
    """Return the entry points of each installed type, sorted by type; several are a clash."""
    return installed(TIERS)


def tier_class(tier_type: str) -> type[OffloadingSpec]:
    """Return the class of a tier type. Raises UnknownPlugin and BrokenPlugin."""
    return _load(entry_of(tier_type))


def make_tier(
    tier_type: str,
    written: Mapping[object, object],
    context: Mapping[str, object] | None = None,
) -> OffloadingSpec:
    """Make a tier's spec from an entry of the YAML; `context` is for its validators.

    Raises UnknownPlugin and BrokenPlugin, and ValidationError for wrong settings.
    """
    entry = entry_of(tier_type)
    spec = _load(entry)

    def make() -> OffloadingSpec:
        made = spec.model_validate(dict(written), context=dict(context or {}))
        made.model_dump(mode="json")  # as commands print it
        if isinstance(made, StoreSpec):
            _ = made.host_local  # as an engine that serves asks for it
        return made

    return run(entry, make, "making its settings")


def tier_parts(tier_type: str, make: Callable[[type[OffloadingSpec]], T]) -> T:
    """Return `make(class)` for a type's class. Raises UnknownPlugin and BrokenPlugin."""
    entry = entry_of(tier_type)
    spec = _load(entry)
    return run(entry, lambda: make(spec), "describing its settings")


def _load(entry: EntryPoint) -> type[OffloadingSpec]:
    return imported_class(entry, OffloadingSpec, _check)


def _check(entry: EntryPoint, spec: type[OffloadingSpec]) -> None:
    """Check what would otherwise fail in the engine. Raises BrokenPlugin."""
    default = spec.model_fields["type"].default
    if isinstance(default, str) and default != entry.name:
        raise broken(entry, f"its class is of type {default}")
    if issubclass(spec, HostSpec) and not is_ours(spec):
        raise broken(entry, "it is a HostSpec, which runs unguarded; make it a StoreSpec")
    check_whole(entry, spec)
    if spec.hit_source not in HIT_SOURCES:
        raise broken(entry, f"its hit_source is {spec.hit_source!r}; use {one_of(HIT_SOURCES)}")
    if isinstance(spec.identity, str):
        raise broken(entry, f"its identity is a text; write ({spec.identity!r},)")
    if isinstance(spec.identity, property):
        raise broken(entry, "its identity is a property; write it in the class: identity = (...)")
    for field in spec.identity:
        if field not in spec.model_fields:
            raise broken(entry, f"its identity has {field!r}, which is none of its fields")


def package_of(spec: OffloadingSpec) -> str | None:
    """The distribution and version that a tier's class is from, or its top module where none is
    known; None: the class is ours."""
    top = type(spec).__module__.partition(".")[0]
    if f"{top}." == OURS:
        return None
    entries = [entry for entry in entries_of() if re.split("[.:]", entry.value)[0] == top]
    entries.sort(key=lambda entry: entry.name != spec.type)
    return owner(entries[0]) if entries else top


def finds_damage(spec: StoreSpec) -> bool:
    """Whether the tier's store detects damage itself, as tests show of ours; of a plugin's nobody
    knows."""
    return spec.verifies and type(spec).open.__module__.startswith(OURS)
