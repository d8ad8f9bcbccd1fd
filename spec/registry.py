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
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from importlib.metadata import EntryPoint, entry_points, version
from typing import TypeVar

from pydantic import ValidationError

from spec.errors import KVTiersError, describe_error, did_you_mean, one_of
from spec.offloading import HIT_SOURCES, OffloadingSpec, StoreSpec

PLUGIN_API = 1
"""The version of what plugins see. It grows when a plugin that was right may fail."""

ENDING: Mapping[int, str] = {}
"""Former versions that are still read, with a warning, and the kvtiers that will read them no
more: the next minor version."""

GROUP = "kvtiers.tiers"
"""The group of entry points of version 1; that of another version ends with `.v` and its number. So
what a package was built for is known before its code runs."""

PAGE = "docs/plugins.md#what-is-public-and-for-how-long"

IMPORT_SECONDS = 30.0
"""Limit for the import of a plugin."""

ASK_SECONDS = 10.0
"""Limit for a plugin's validators, its serializers and `host_local`."""

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
    # A package may name one type for several versions, of which the newest that is read counts.
    for entry in sorted(_entries(), key=_preference):
        found.setdefault(entry.name, {})[_owner(entry)] = entry
    return {name: _rightful(found[name].values()) for name in sorted(found)}


def _entries() -> Iterator[EntryPoint]:
    """The entry points of tier types, for whatever version of the plugin API."""
    every = entry_points()
    for group in every.groups:
        if _api_of(group):
            yield from every.select(group=group)


def _api_of(group: str) -> int:
    """The version of the plugin API that a group of entry points is of; 0: it is none of ours."""
    if group == GROUP:
        return 1
    number = group.removeprefix(f"{GROUP}.v")
    return int(number) if number != group and number.isdecimal() else 0


def _preference(entry: EntryPoint) -> tuple[bool, int]:
    api = _api_of(entry.group)
    return api == PLUGIN_API or api in ENDING, api


def _rightful(entries: Collection[EntryPoint]) -> tuple[EntryPoint, ...]:
    """Return our entry points if the name is ours, else all."""
    ours = tuple(entry for entry in entries if entry.value.startswith(_OURS))
    if not ours:
        return tuple(entries)
    for other in entries:
        if other not in ours:
            _warn_taken(other.name, _owner(other))
    return ours


@functools.cache
def _warn_taken(name: str, owner: str) -> None:
    _log.warning(
        "the tier type %s is kvtiers' own; the one that the package %s provides is not used",
        name,
        owner,
    )


@functools.cache
def _warn_ending(owner: str, api: int, last: str) -> None:
    line = "%s was built for plugin API %d, which kvtiers %s reads no more; this is %d: see %s"
    _log.warning(line, owner, api, last, PLUGIN_API, PAGE)


def tier_class(tier_type: str) -> type[OffloadingSpec]:
    """Return the class of a tier type. Raises UnknownTierType and BrokenTierType."""
    return _load(_entry(tier_type))


def make_tier(
    tier_type: str,
    written: Mapping[object, object],
    context: Mapping[str, object] | None = None,
) -> OffloadingSpec:
    """Make a tier's spec from an entry of the YAML; `context` is for its validators.

    Raises UnknownTierType and BrokenTierType, and ValidationError for wrong settings.
    """
    entry = _entry(tier_type)
    spec = _load(entry)

    def make() -> OffloadingSpec:
        made = spec.model_validate(dict(written), context=dict(context or {}))
        made.model_dump(mode="json")  # as commands print it
        if isinstance(made, StoreSpec):
            _ = made.host_local  # as an engine that serves asks for it
        return made

    return _run(entry, make, "making its settings")


def tier_parts(tier_type: str, make: Callable[[type[OffloadingSpec]], T]) -> T:
    """Return `make(class)` for a type's class. Raises UnknownTierType and BrokenTierType."""
    entry = _entry(tier_type)
    spec = _load(entry)
    return _run(entry, lambda: make(spec), "describing its settings")


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
    api = _api_of(entry.group)
    if api in ENDING:
        _warn_ending(_owner(entry), api, ENDING[api])
    elif api != PLUGIN_API:
        raise BrokenTierType(
            f"its package {_owner(entry)} was built for plugin API {api}, this is {PLUGIN_API}: "
            f"see {PAGE}"
        )
    loaded = _run(entry, entry.load, "its import", IMPORT_SECONDS)
    if not (isinstance(loaded, type) and issubclass(loaded, OffloadingSpec)):
        raise _broken(entry, "it is not an OffloadingSpec")
    _run(entry, lambda: _check(entry, loaded), "a check of its class")
    return loaded


def _check(entry: EntryPoint, spec: type[OffloadingSpec]) -> None:
    """Check what would otherwise fail in the engine. Raises BrokenTierType."""
    default = spec.model_fields["type"].default
    if isinstance(default, str) and default != entry.name:
        raise _broken(entry, f"its class is of type {default}")
    if inspect.isabstract(spec):
        missing = ", ".join(sorted(spec.__abstractmethods__))
        raise _broken(entry, f"its class does not implement {missing}")
    if spec.hit_source not in HIT_SOURCES:
        raise _broken(entry, f"its hit_source is {spec.hit_source!r}; use {one_of(HIT_SOURCES)}")
    if isinstance(spec.identity, str):
        raise _broken(entry, f"its identity is a text; write ({spec.identity!r},)")
    for field in spec.identity:
        if field not in spec.model_fields:
            raise _broken(entry, f"its identity has {field!r}, which is none of its fields")


def _run(entry: EntryPoint, ask: Callable[[], T], what: str, seconds: float = 0) -> T:
    """Run a tier type's code: a plugin's on another thread, since it may hang, for `seconds` at
    most (0: `ASK_SECONDS`). Raises ValidationError, and BrokenTierType for all else that goes wrong
    in `what`. A plugin's prints go to stderr."""
    if entry.value.startswith(_OURS):
        return ask()
    ended: Future[T] = Future()

    def call() -> None:
        try:
            ended.set_result(ask())
        except BaseException as error:  # noqa: BLE001 - raised where it was asked for
            ended.set_exception(error)

    limit = seconds or ASK_SECONDS
    with stdout_to_stderr():
        threading.Thread(target=call, name=f"ask {entry.value}", daemon=True).start()
        if not wait([ended], limit).done:
            raise _broken(entry, f"{what} takes more than {limit:g} s")
    error = ended.exception()
    if error is None or isinstance(error, BrokenTierType | ValidationError):
        return ended.result()
    raise _broken(entry, f"{what} raised {describe_error(error)}") from error


# Without it the one of two threads that leaves last would leave stdout at stderr.
_printing = threading.RLock()


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Meanwhile all prints go to stderr, those of libraries and children too: the output of a
    command may be another's input. Also for other threads."""
    stdout = sys.stdout
    if stdout is None or sys.stderr is None:  # as in a process without a terminal
        yield
        return
    with _printing, redirect_stdout(sys.stderr), ExitStack() as stack:
        with suppress(OSError, ValueError):  # one of them may be closed
            stdout.flush()
            kept = os.dup(1)
            stack.callback(os.close, kept)
            os.dup2(2, 1)
            stack.callback(os.dup2, kept, 1)
            stack.callback(stdout.flush)
        yield


def _broken(entry: EntryPoint, reason: str) -> BrokenTierType:
    return BrokenTierType(
        f"its package {_owner(entry)} is broken, or made for another version than kvtiers "
        f"{version('kvtiers')}: reinstall it, or another version ({entry.value}: {reason})"
    )


def package_of(spec: OffloadingSpec) -> str | None:
    """The distribution and version that a tier's class is from, or its top module where none is
    known; None: the class is ours."""
    top = type(spec).__module__.partition(".")[0]
    if f"{top}." == _OURS:
        return None
    entries = [entry for entry in _entries() if _top(entry) == top]
    entries.sort(key=lambda entry: entry.name != spec.type)
    return _owner(entries[0]) if entries else top


def opens_ours(spec: StoreSpec) -> bool:
    """Whether the tier's store is made by code of ours."""
    return type(spec).open.__module__.startswith(_OURS)


def _top(entry: EntryPoint) -> str:
    return entry.value.partition(":")[0].partition(".")[0]


def _owner(entry: EntryPoint) -> str:
    found = entry.dist
    return f"{found.name} {found.version}" if found is not None else entry.value
