"""Notes of a worker's namespaces beside a tier's blocks, by which tools know whose they are."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace

from spec.offloading import StoreSpec
from tiers.contract.engine_info import ALONE
from tiers.errors import KVTiersError
from tiers.records import NamespaceNote
from tiers.wrappers.opening import log_name

logger = logging.getLogger(__name__)


def describe(
    facts: Mapping[str, str],
    model: str,
    block_tokens: int,
    payload_bytes: int,
    rank: int = 0,
    ranks: int = 1,
) -> NamespaceNote:
    """What to note of a namespace, which is a digest of these `facts`."""
    return NamespaceNote(
        model=model,
        engine=facts.get("engine", ""),
        layout=facts.get("layout", ""),
        block_tokens=block_tokens,
        payload_bytes=payload_bytes,
        rank=rank,
        ranks=ranks,
        salted=bool(facts.get("salt")),
        lasts=not facts.get("weights", "").startswith(ALONE),
        opened=0.0,
    )


class NamespaceNotes:
    """Keeps a note of each namespace that an engine stores under in one tier. Of an encrypted tier
    nothing is noted: a model's name would lie beside what hides it. Used by the tier's writer."""

    def __init__(self, spec: StoreSpec, note: NamespaceNote) -> None:
        self._spec = spec
        self._note = note
        self._kept: set[bytes] = set()

    def lacks(self, namespace: bytes) -> bool:
        """Whether no note of a namespace was kept, or tried to be, by this object."""
        return namespace not in self._kept

    def keep(self, namespace: bytes, lasts: bool) -> None:
        """Keep a note of a namespace, once. `lasts`: it is not a generation's."""
        if not self.lacks(namespace):
            return
        self._kept.add(namespace)
        note = replace(self._note, lasts=lasts and self._note.lasts, opened=time.time())
        try:
            records = None if self._spec.encryption else self._spec.records()
            if records is None:
                return
            try:
                records.note(namespace, note.encode())
            finally:
                records.close()
        except (KVTiersError, OSError) as error:
            logger.info(
                "tier %r: kvtiers inspect can't name the model of its blocks: no note can be kept "
                "of their namespace (%s)",
                log_name(self._spec),
                error,
            )
