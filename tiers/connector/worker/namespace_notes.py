"""Notes of a worker's namespaces beside a tier's blocks, by which tools know whose they are."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace

from spec.fields import format_size
from spec.offloading import StoreSpec
from tiers.contract.engine_info import ALONE
from tiers.errors import KVTiersError
from tiers.records import NamespaceNote, StoredRecords, read_note
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
        self._has_warned = False

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
                self._warn_of_other_sizes(records)
            finally:
                records.close()
        except (KVTiersError, OSError) as error:
            logger.info(
                "tier %r: kvtiers inspect can't name the model of its blocks: no note can be kept "
                "of their namespace (%s)",
                log_name(self._spec),
                error,
            )

    def _warn_of_other_sizes(self, records: StoredRecords) -> None:
        """Say that engines of this model with more or fewer ranks find nothing of each other's."""
        mine = self._note
        # A server would have to list all of its keys.
        if mine.rank or self._has_warned or not self._spec.is_prompt:
            return
        notes = filter(None, map(read_note, records.notes().values()))
        same = (note for note in notes if note.model == mine.model and note.lasts)
        if sizes := sorted({note.ranks for note in same} - {mine.ranks}):
            self._has_warned = True
            logger.warning(
                "tier %r has KV of %s from engines of %s rank(s), and this one has %d: neither "
                "finds what the other stores, so each computes and stores a prompt itself, here "
                "%s a token and rank. Give all engines one tensor parallel size. (Records that "
                "they share are not built: single KV heads take 1.4 to 2.5 times as long to copy)",
                log_name(self._spec),
                mine.model,
                " and ".join(map(str, sizes)),
                mine.ranks,
                format_size(mine.payload_bytes // mine.block_tokens),
            )
