"""The records that a tier holds, as tools list, check, move and remove them.

A store is asked for blocks by their keys; a tool does not know those. A tier that can list what it
holds says so by `StoreSpec.records`, which opens this beside running engines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, Protocol

from pydantic import TypeAdapter, ValidationError

from tiers.block import Header

MAX_NOTE_BYTES = 8192
"""Bytes of a namespace's note."""


class StoredRecord(NamedTuple):
    """A record as its tier lists it.

    `name`: what finds it there. `digest`: of its whole key (`tiers.block`). `namespace`: the
    beginning of its namespace, 8 bytes at least. `payload_bytes`: of its block; 0: what lies there
    is no record of this format. `size`: bytes that it takes. `used`: when it was stored or used
    last, about, in seconds since the epoch; None: unknown. `order`: larger for records used later.
    `entry`: the tier's own.
    """

    name: bytes
    digest: bytes
    namespace: bytes
    payload_bytes: int
    size: int
    used: float | None
    order: float
    entry: Any = None


class Finding(NamedTuple):
    """What reading a record showed. `gone`: it was evicted or dropped since it was listed."""

    state: Literal["whole", "gone", "damaged"]
    why: str = ""


WHOLE, GONE = Finding("whole"), Finding("gone")

Use = Callable[[Header, memoryview], object]
"""Called with a whole record: its header and its stored bytes, which are valid during the call. On
threads of the tier, several at a time; it does no I/O."""


def ignore(header: Header, stored: memoryview) -> None:
    """Use a record for nothing but its check."""


class StoredRecords(Protocol):
    """The records of one tier, for one tool. Any method may raise TierError or OSError. None of
    them counts as a use of a block, and engines go on storing and evicting meanwhile."""

    def listed(self) -> Iterator[Sequence[StoredRecord]]:
        """List the records in pieces of at most some thousand; each that is held from beginning to
        end is listed once at least."""

    def read(self, some: Sequence[StoredRecord], use: Use = ignore) -> list[Finding]:
        """Read these records and check key, length and checksum; call `use` for those that are
        whole."""

    def drop_damaged(self, some: Sequence[StoredRecord]) -> int:
        """Read these records once more and drop those that are damaged still; return how many. A
        block that was stored anew since it was listed stays."""

    def drop(self, some: Sequence[StoredRecord]) -> None:
        """Drop these records, whatever they are; some hundred at most, since engines wait."""

    def others(self) -> bool | None:
        """Whether another process has the tier open; None: it can't be seen."""

    def notes(self) -> Mapping[bytes, bytes]:
        """The notes of namespaces that engines left here."""

    def note(self, namespace: bytes, text: bytes) -> None:
        """Keep a note of a namespace, in place of the one before; empty: keep none. Other methods
        need not have been called; this one opens as little as it needs."""

    def close(self) -> None:
        """Release every resource. Idempotent."""


class Marks(Protocol):
    """Marks beside a tier's blocks. None of its methods costs more where there are more blocks; any
    may raise TierError or OSError."""

    def mark(self, names: Sequence[bytes]) -> None:
        """Keep these marks, of 16 bytes each; they may end as unused blocks do."""

    def marked(self, names: Sequence[bytes]) -> list[bool]:
        """Say for each whether it is kept."""

    def close(self) -> None:
        """Release every resource. Idempotent."""


@dataclass(frozen=True)
class NamespaceNote:
    """What an engine says of its namespace, beside its blocks: no secret, and no salt.

    `model`: as its operator calls it. `layout`: digest of the KV layout. `payload_bytes`: of a
    block. `lasts`: whether an engine after this one can have the namespace; those of a generation
    and of weights that can't be identified end with their engine. `opened`: when an engine last
    began to store or load here, in seconds since the epoch. `revision`: the `KV_REVISION` of which
    the namespace is.
    """

    model: str
    engine: str
    layout: str
    block_tokens: int
    payload_bytes: int
    rank: int
    ranks: int
    salted: bool
    lasts: bool
    opened: float
    revision: int

    def encode(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()


def read_note(text: bytes) -> NamespaceNote | None:
    """The note that a tier keeps; None: it is of another version, or damaged."""
    if len(text) > MAX_NOTE_BYTES or not text.isascii():
        return None
    try:
        return TypeAdapter(NamespaceNote).validate_json(text, strict=True)
    except ValidationError:
        return None


def in_batches(some: Iterable[StoredRecord], most: int) -> Iterator[list[StoredRecord]]:
    """Part records into batches of at most `most` bytes and 64 records, one record at least."""
    batch: list[StoredRecord] = []
    size = 0
    for record in some:
        if batch and (size + record.size > most or len(batch) == 64):
            yield batch
            batch, size = [], 0
        batch.append(record)
        size += record.size
    if batch:
        yield batch
