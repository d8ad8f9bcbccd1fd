"""Opening a tier's store as its settings ask for: encrypted, and behind a guard."""

from __future__ import annotations

import logging
from dataclasses import replace

from spec.encryption import EncryptionSpec, others_can_read, read_keys
from spec.offloading import StoreSite, StoreSpec
from tiers.errors import TierUnusable
from tiers.guard import Guarded, guard
from tiers.store import TierStore

logger = logging.getLogger(__name__)


def open_guarded(spec: StoreSpec, site: StoreSite) -> Guarded:
    """Open a tier's store; the caller owns it. Raises TierUnusable."""
    store = spec.open(site) if spec.encryption is None else _encrypt(spec, spec.encryption, site)
    return guard(store, spec.tier_name, deadline=spec.deadline)


def _encrypt(spec: StoreSpec, encryption: EncryptionSpec, site: StoreSite) -> TierStore:
    try:
        from tiers.cipher import encrypted, sealed_bytes
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
