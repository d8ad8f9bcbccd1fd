"""Opening a tier's store as its settings ask for: encrypted, and behind a guard."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from spec.encryption import EncryptionSpec, others_can_read, read_keys
from spec.offloading import StoreSite, StoreSpec
from tiers.errors import TierNotOpen, TierUnusable
from tiers.store import Block, TierStore
from tiers.wrappers.guard import Guarded, guard

logger = logging.getLogger(__name__)


def open_guarded(spec: StoreSpec, site: StoreSite) -> Guarded:
    """Open a tier's store; the caller owns it. Raises TierUnusable.

    One that can't be opened for now is opened by the verbs, when its breaker lets them try.
    """
    store: TierStore
    try:
        store = _open(spec, site)
    except TierNotOpen as error:
        logger.error("tier %r is unusable for now, and tried again: %s", spec.tier_name, error)
        store = _Later(lambda: _open(spec, site))
    return guard(store, spec.tier_name, deadline=spec.deadline)


def _open(spec: StoreSpec, site: StoreSite) -> TierStore:
    return spec.open(site) if spec.encryption is None else _encrypt(spec, spec.encryption, site)


class _Later:
    """A TierStore that is opened by its first verb that can; until then every one raises."""

    def __init__(self, open_store: Callable[[], TierStore]) -> None:
        self._open = open_store
        self._store: TierStore | None = None
        # Without it two verbs would open it twice.
        self._lock = threading.Lock()

    def _opened(self) -> TierStore:
        with self._lock:
            if self._store is None:
                self._store = self._open()
            return self._store

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return self._opened().has(keys)

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        return self._opened().put(blocks)

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        return self._opened().get(blocks)

    def drop(self, keys: Sequence[bytes]) -> None:
        self._opened().drop(keys)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


def _encrypt(spec: StoreSpec, encryption: EncryptionSpec, site: StoreSite) -> TierStore:
    try:
        from tiers.wrappers.encryption import encrypted, sealed_bytes
    except ModuleNotFoundError as error:
        raise TierUnusable(f"encryption needs {error.name}: install kvtiers[encryption]") from error
    try:
        keys = read_keys(encryption.key_file)
        open_to_all = others_can_read(encryption.key_file)
    except (ValueError, OSError) as error:
        raise TierUnusable(f"encryption.key_file {encryption.key_file}: {error}") from error
    if open_to_all:
        logger.warning("every user can read the keys in %s", encryption.key_file)
    inner = spec.open(replace(site, payload_bytes=sealed_bytes(site.payload_bytes)))
    return encrypted(inner, keys, site.payload_bytes)
