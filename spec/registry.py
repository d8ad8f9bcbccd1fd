"""Tier types: the values of `type` in an entry of `tiers:`, and the class of each.

Each is an entry point of the group `kvtiers.tiers` in an installed package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, TypeVar

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
    tier_type: str, written: Mapping[object, object], context: Mapping[str, object] | None = None
) -> OffloadingSpec:
    """Make a tier's spec from an entry of the YAML; `context` is for its validators.

    Raises UnknownPlugin and BrokenPlugin, and ValidationError for wrong settings.
    """
    entry = entry_of(tier_type)
    spec = _load(entry)

    def make() -> OffloadingSpec:
        made = spec.model_validate(dict(written), context=dict(context or {}))
        made.model_dump(mode="json")  # as commands print it
        if not is_ours(spec):
            _check_made(entry, spec, made)
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
    members = {**vars(OffloadingSpec), **vars(StoreSpec)}
    for field in spec.model_fields:
        if members.get(field, False) is not False:  # a field can say what a flag does
            raise broken(entry, f"its field {field} has the name of what every tier's class has")
    if spec.hit_source not in HIT_SOURCES:
        raise broken(entry, f"its hit_source is {spec.hit_source!r}; use {one_of(HIT_SOURCES)}")
    for field in spec.identity:
        if field not in spec.model_fields:
            raise broken(entry, f"its identity has {field!r}, which is none of its fields")


class _Ours(StoreSpec):
    """The keys of every store, as they are before a plugin declares them anew."""

    def open(self, site: Any) -> Any: ...


_ASKED: Mapping[Any, tuple[str, ...]] = {
    bool: ("is_prompt", "verifies", "resizes", "may_load", "may_store"),
    bool | None: ("host_local",),
    Path | None: ("notes_folder",),
    int: ("capacity_bytes",),
}
"""What an engine asks of settings beside the keys, on its own thread, and the type of each."""


def _check_made(entry: EntryPoint, spec: type[OffloadingSpec], made: object) -> None:
    """Check what would otherwise fail in the engine. Raises BrokenPlugin."""
    if not (isinstance(made, spec) and isinstance(made, StoreSpec)):
        raise broken(entry, f"its validator made a {type(made).__name__} of it")
    for kind, names in _ASKED.items():
        for name in names:
            if not isinstance(found := getattr(made, name), kind):
                raise broken(entry, f"no engine can use its {name}, {found!r:.40}")
    for name in StoreSpec.model_fields:
        found = getattr(made, name)
        if name == "name" and made.tier_name != made.type:  # which may have any characters
            found = made.tier_name
        values: dict[str, Any] = {"type": made.type, name: found}
        try:
            as_ours = _Ours.model_construct(**values)
            _Ours.model_validate(as_ours.model_dump(mode="json", warnings="error"))
        except ValueError as error:  # of pydantic, when it writes or when it reads
            raise broken(entry, f"no engine can use its {name}, {found!r:.40}") from error


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
