"""What do packages plug in? The entry points of a group, and a guard around the code behind them.

Ours register as a plugin's do, and no other package can take their names. A class is imported when
its name is used, not before. If a plugin's code fails in any way, its package is reported as
broken, by name; everything else still works.
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
from importlib.metadata import Distribution, EntryPoint, entry_points, version
from typing import Any, TypeVar

from pydantic import ValidationError

from spec.errors import KVTiersError, describe_error, did_you_mean, one_of

PLUGIN_API = 1
"""The version of what plugins see. It grows when a plugin that was right may fail; `PAGE` says for
how long the one before is read then."""

TIERS = "kvtiers.tiers"
EVICTION = "kvtiers.eviction"
ADMISSION = "kvtiers.admission"
"""The groups of entry points of version 1; that of another version ends with `.v` and its number.
So what a package was built for is known before its code runs."""

_WHAT = {TIERS: "tier type", EVICTION: "eviction policy", ADMISSION: "admission policy"}

PAGE = "docs/plugins.md#what-is-public-and-for-how-long"

IMPORT_SECONDS = 30.0
"""Limit for the import of a plugin."""

ASK_SECONDS = 10.0
"""Limit for a plugin's validators, its serializers and its properties."""

OURS = "tiers."
_log = logging.getLogger(__name__)

T = TypeVar("T")


class UnknownPlugin(KVTiersError, ValueError):
    """No installed package provides the tier type or policy."""


class BrokenPlugin(KVTiersError, ValueError):
    """The package that provides the tier type or policy is broken."""


def installed(group: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Return the entry points of each name in a group, sorted by name; several are a clash."""
    found: dict[str, dict[Distribution | str, EntryPoint]] = {}
    # A package may name one type for several versions, of which the one that is read counts.
    for entry in sorted(entries_of(group), key=lambda entry: _api_of(entry) == PLUGIN_API):
        found.setdefault(entry.name, {})[entry.dist or entry.value] = entry
    return {name: _rightful(found[name].values(), group) for name in sorted(found)}


def entries_of(first: str = TIERS) -> Iterator[EntryPoint]:
    """The entry points of a group, for whatever version of the plugin API."""
    # Python passes over what is no text there.
    places = tuple((place, _changed(place)) for place in sys.path if isinstance(place, str))
    for entry in _entries(places):
        if entry.group == first or entry.group.startswith(f"{first}.v"):
            yield entry


@functools.lru_cache(maxsize=1)
def _entries(places: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """Ours and plugins' entry points of the packages in these folders. For each tier the files of
    all packages would else be read again, which are hundreds beside an engine."""
    every = entry_points()
    return tuple(
        entry for group in every.groups for entry in every.select(group=group) if _api_of(entry)
    )


def _changed(place: str) -> int:
    """When a package came into a folder of `sys.path`, or left it, the last time."""
    try:
        return os.stat(place or ".").st_mtime_ns
    except OSError:
        return 0


def _api_of(entry: EntryPoint) -> int:
    """The version of the plugin API that an entry point is for; 0: it is none of ours."""
    if entry.group in (TIERS, EVICTION, ADMISSION):
        return 1
    number = entry.group.rpartition(".v")[2]
    return int(number) if number.isdecimal() else 0


def _rightful(entries: Collection[EntryPoint], group: str) -> tuple[EntryPoint, ...]:
    """Return our entry points if the name is ours, else all."""
    ours = tuple(entry for entry in entries if entry.value.startswith(OURS))
    if not ours:
        return tuple(entries)
    for other in entries:
        if other not in ours:
            _warn_taken(_WHAT[group], other.name, owner(other))
    return ours


@functools.cache
def _warn_taken(kind: str, name: str, owner: str) -> None:
    _log.warning(
        "the %s %s is kvtiers' own; the one that the package %s provides is not used",
        kind,
        name,
        owner,
    )


def entry_of(name: str, group: str = TIERS) -> EntryPoint:
    types = installed(group)
    if not types:
        raise UnknownPlugin(f"no {_WHAT[group]} is installed; install kvtiers with pip")
    if name not in types:
        raise UnknownPlugin(did_you_mean(name, types) or f"use {one_of(types)}")
    if len(types[name]) > 1:
        owners = ", ".join(sorted(map(owner, types[name])))
        raise BrokenPlugin(f"several packages provide it: {owners}; uninstall all but one")
    (entry,) = types[name]
    return entry


def is_ours(policy: type) -> bool:
    """Whether a class is kvtiers' own."""
    return policy.__module__.startswith(OURS)


def check_whole(entry: EntryPoint, loaded: Any) -> None:
    """Raises BrokenPlugin for a class that lacks a method."""
    if inspect.isabstract(loaded):
        missing = ", ".join(sorted(loaded.__abstractmethods__))
        raise broken(entry, f"its class does not implement {missing}")


def imported_class(
    entry: EntryPoint, kind: type[T], check: Callable[[EntryPoint, Any], None] = check_whole
) -> type[T]:
    """The class that an entry point names, of this kind. Raises BrokenPlugin for another one, for a
    version of the plugin API that is not read, and what `check` raises."""
    api = _api_of(entry)
    if api != PLUGIN_API:
        raise BrokenPlugin(
            f"its package {owner(entry)} was built for plugin API {api}, this is {PLUGIN_API}: "
            f"see {PAGE}"
        )
    if not entry.pattern.match(entry.value):
        raise broken(entry, "its entry point is not module:Class")
    loaded = run(entry, entry.load, "its import", IMPORT_SECONDS)
    if not (isinstance(loaded, type) and issubclass(loaded, kind)):
        raise broken(entry, f"it is not an {kind.__name__}")
    run(entry, lambda: check(entry, loaded), "a check of its class")
    return loaded


def run(entry: EntryPoint, ask: Callable[[], T], what: str, seconds: float = 0) -> T:
    """Run a tier type's code: a plugin's on another thread, since it may hang, for `seconds` at
    most (0: `ASK_SECONDS`). Raises ValidationError, and BrokenPlugin for all else that goes wrong
    in `what`. A plugin's prints go to stderr."""
    if entry.value.startswith(OURS):
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
            raise broken(entry, f"{what} takes more than {limit:g} s")
    error = ended.exception()
    if error is None or isinstance(error, BrokenPlugin | ValidationError):
        return ended.result()
    raise broken(entry, f"{what} raised {describe_error(error)}") from error


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


def broken(entry: EntryPoint, reason: str) -> BrokenPlugin:
    return BrokenPlugin(
        f"its package {owner(entry)} is broken, or made for another version than kvtiers "
        f"{version('kvtiers')}: reinstall it, or another version ({entry.value}: {reason})"
    )


def owner(entry: EntryPoint) -> str:
    found = entry.dist
    return f"{found.name} {found.version}" if found is not None else entry.value
