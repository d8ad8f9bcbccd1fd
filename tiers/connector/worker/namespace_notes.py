"""Notes of a worker's namespaces beside a tier's blocks, by which tools know whose they are."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import replace
from itertools import compress

from spec.fields import format_size
from spec.offloading import StoreSpec
from tiers.block import KV_REVISION
from tiers.block import namespace as namespace_of
from tiers.concurrency.executors import IoExecutor
from tiers.contract.engine_info import ALONE
from tiers.errors import KVTiersError
from tiers.records import NamespaceNote, read_note
from tiers.wrappers.opening import log_name

logger = logging.getLogger(__name__)


def note_of(
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
        revision=KV_REVISION,
    )


SIZES = (*range(1, 9), *range(10, 33, 2), *range(40, 97, 8), 128)
"""Numbers of ranks for which marks are looked up: a tier with marks lists nothing."""

GENERATIONS = 16
"""Generations whose notes are kept. An engine drops the blocks of one that is over; if its weights
change by the minute, it would else leave a note each time."""

AGAIN_S = 600.0
"""Seconds after which a note in use is kept anew: a server's expires with its `ttl` or is evicted,
since nobody asks for it, and a folder's goes with the folder."""


class NamespaceNotes:
    """Keeps a note of each namespace that an engine stores under in one tier, and knows which other
    tensor parallel sizes its model has there. Of an encrypted tier nothing is noted: a model's name
    would lie beside what hides it. Used by one thread at a time."""

    def __init__(
        self, spec: StoreSpec, note: NamespaceNote, token_bytes: int | None = None
    ) -> None:
        """`token_bytes`: of all ranks; None: those of one, for each."""
        self._spec = spec
        self._note = note
        all_ranks = note.ranks * note.payload_bytes // note.block_tokens
        self._token_bytes = all_ranks if token_bytes is None else token_bytes
        self._begun: dict[bytes, float] = {}
        self._last: Future[None] | None = None
        self._passing: deque[bytes] = deque()
        """Generations that have a note, the oldest first."""
        self._has_looked = False

    def begin(self, namespace: bytes, lasts: bool) -> None:
        """Begin to keep a note of a namespace, unless it was of late. On a thread of its own: one
        that hangs, as in a file system does, holds up no put. While another is being kept nothing
        begins; it does when this is asked again."""
        now, last = time.monotonic(), self._last
        is_of_late = now < self._begun.get(namespace, -AGAIN_S) + AGAIN_S
        if is_of_late or not (last is None or last.done()):
            return
        if not self._begun and not self._spec.encryption:
            line = "tier %r: rank %d has its blocks under the namespace %s"
            logger.info(line, log_name(self._spec), self._note.rank, namespace.hex())
        self._begun = {one: at for one, at in self._begun.items() if now < at + AGAIN_S}
        self._begun[namespace] = now
        with suppress(RuntimeError):  # no thread can be had, or the engine ends
            thread = IoExecutor(1, "notes")
            self._last = thread.submit(self.keep, namespace, lasts)
            thread.shutdown(wait=False)

    def keep(self, namespace: bytes, lasts: bool) -> None:
        """Keep a note of a namespace. `lasts`: it is not a generation's."""
        if self._spec.encryption:
            return
        note = replace(self._note, lasts=lasts and self._note.lasts, opened=time.time())
        try:
            if not lasts and namespace not in self._passing:
                self._passing.append(namespace)
            self._keep(namespace, note)
            if not self._has_looked and not note.rank:
                self._has_looked = True
                self._warn_of_other_sizes(self._other_sizes(note))
        except (KVTiersError, OSError, RuntimeError) as error:  # the last: no thread can be had
            logger.info(
                "tier %r: kvtiers inspect can't name the model of its blocks, nor an engine those "
                "of another size: no note can be kept of their namespace (%s)",
                log_name(self._spec),
                error,
            )

    def _keep(self, namespace: bytes, note: NamespaceNote) -> None:
        over = [self._passing.popleft() for _ in range(len(self._passing) - GENERATIONS)]
        if (records := self._spec.records()) is not None:
            with closing(records):
                records.note(namespace, note.encode())
                for one in over:
                    records.note(one, b"")

    def _other_sizes(self, mine: NamespaceNote) -> list[int]:
        """The numbers of ranks, other than ours, of engines of this model that have stored here."""
        if (marks := self._spec.marks()) is not None:
            with closing(marks):
                if mine.lasts:
                    marks.mark([_mark(mine.model, mine.ranks)])
                found = marks.marked([_mark(mine.model, size) for size in SIZES])
            return [size for size in compress(SIZES, found) if size != mine.ranks]
        # Who has no marks lists its notes, which are files.
        if not self._spec.is_prompt or (records := self._spec.records()) is None:
            return []
        with closing(records):
            notes = filter(None, map(read_note, records.notes().values()))
            same = (note for note in notes if note.model == mine.model and note.lasts)
            return sorted({note.ranks for note in same} - {mine.ranks})

    def _warn_of_other_sizes(self, sizes: list[int]) -> None:
        """Say that engines of this model with more or fewer ranks find nothing of each other's."""
        if sizes:
            logger.warning(
                "tier %r was given KV of %s from engines of %s rank(s), and this one has %d: "
                "neither finds what the other stores, so each computes and stores a prompt itself, "
                "here %s a token. Give all engines one tensor parallel size. (Records that they "
                "share are not built: single KV heads take 1.4 to 2.5 times as long to copy)",
                log_name(self._spec),
                self._note.model,
                " and ".join(map(str, sizes)),
                self._note.ranks,
                format_size(self._token_bytes),
            )


def _mark(model: str, ranks: int) -> bytes:
    return namespace_of({"model": model}, rank=0, world_size=ranks)
