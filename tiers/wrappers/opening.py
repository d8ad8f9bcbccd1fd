"""Opening a tier's store as its settings ask for: verified or encrypted, and behind a guard."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from spec.errors import describe_error, reason_of
from spec.offloading import EncryptionSpec, OffloadingSpec, StoreContext, StoreSpec, read_keys
from spec.registry import finds_damage, package_of
from tiers.errors import TierUnusable
from tiers.store import TierStore
from tiers.wrappers.guard import Guarded
from tiers.wrappers.integrity import VerifiedStore, record_bytes
from tiers.wrappers.put_process import PutsApart
from tiers.wrappers.reopening import Reopening

logger = logging.getLogger(__name__)

OPEN_SECONDS = 10.0
"""How long an engine that starts waits for a store to open, or the tier's deadline if that is
longer; then it serves, and the tier joins later."""

STEP_SECONDS = 1.0
"""The same for an engine that serves already."""

_VERBS = ("has", "put", "get", "drop", "close")


def open_guarded(
    spec: StoreSpec,
    site: StoreContext,
    in_step: bool = False,
    announce: Callable[[TierStore], None] | None = None,
    puts_apart: bool = False,
) -> Guarded:
    """Open a tier's store; the caller owns it. Raises TierUnusable.

    One that can't be opened for now is tried again, and joins when it is open, as one does that
    takes long. `in_step`: the engine waits meanwhile, which it
    may only for a moment. `announce` is called with the open store, on the thread that opened it.
    `puts_apart`: a process beside this one puts the blocks (see `put_process`).
    """
    name, mark = log_name(spec), ""

    def make() -> TierStore:
        nonlocal mark  # under another key the engine's other processes would find nothing
        made = open_unguarded(spec, site, mark)
        mark = getattr(made, "key_mark", "")
        return PutsApart(made, spec, site, name) if puts_apart else made

    try:
        store = Reopening(name, make, announce)
        store.first(STEP_SECONDS if in_step else max(OPEN_SECONDS, spec.deadline))
    except TierUnusable as error:
        if package_of(spec) is None:
            raise
        raise TierUnusable(f"{name}: {reason_of(error)}") from error
    except Exception as error:
        raise TierUnusable(f"{name}: open raised {describe_error(error)}") from error
    return Guarded(store, name, deadline=spec.deadline, is_prompt=spec.is_prompt)


def log_name(spec: OffloadingSpec) -> str:
    """What logs call a tier: its name, and of a plugin's the package and its version too."""
    package = package_of(spec)
    return spec.tier_name if package is None else f"{spec.tier_name} (package {package})"


def open_stored(spec: StoreSpec, payload_bytes: int) -> TierStore:
    """Open a tier's store without a guard, under its encryption if it has one, to put blocks in the
    form that they are stored in. Raises what `open` raises."""
    site = StoreContext(payload_bytes)
    if spec.encryption is not None:
        return _with_verbs(spec.open(site))
    return open_unguarded(spec, site)


def open_unguarded(spec: StoreSpec, site: StoreContext, mark: str = "") -> TierStore:
    """Open a tier's store, verified or encrypted, which puts under the key of this `mark`, or else
    the first. Raises what `open` raises."""
    if spec.encryption is not None:
        keys = usable_keys(spec.encryption, mark)
        from tiers.wrappers.encryption import EncryptedStore, encrypted_bytes

        inner = spec.open(replace(site, payload_bytes=encrypted_bytes(site.payload_bytes)))
        return EncryptedStore(_with_verbs(inner), keys, site.payload_bytes)
    if finds_damage(spec):
        return _with_verbs(spec.open(site))
    record = replace(site, payload_bytes=record_bytes(site.payload_bytes))
    return VerifiedStore(_with_verbs(spec.open(record)), site.payload_bytes)


def _with_verbs(store: TierStore) -> TierStore:
    missing = [verb for verb in _VERBS if not callable(getattr(store, verb, None))]
    if missing:
        verbs = ", ".join(missing)
        raise TierUnusable(f"open returned a {type(store).__name__}, which has no {verbs}")
    return store


def usable_keys(encryption: EncryptionSpec, mark: str = "") -> list[bytes]:
    """Read the keys, the one of this mark first, and warn if all users can. Raises TierUnusable if
    nothing can be encrypted here."""
    try:
        from tiers.wrappers.encryption import key_mark  # what it needs may be missing
    except ModuleNotFoundError as error:
        raise TierUnusable(f"encryption needs {error.name}: install kvtiers[encryption]") from error
    try:
        keys = sorted(read_keys(encryption.key_file), key=lambda key: key_mark(key) != mark)
        if mark not in ("", key_mark(keys[0])):
            raise ValueError("it has not the key that this engine began with; restart the engine")
        open_to_all = encryption.key_file.stat().st_mode & 0o004
    except (ValueError, OSError) as error:
        raise TierUnusable(f"encryption.key_file {encryption.key_file}: {error}") from error
    if open_to_all:
        logger.warning("every user can read the keys in %s", encryption.key_file)
    return keys
