"""Inspecting a tier: its blocks by namespace, and whose they are, as far as it can tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tiers.block import KV_REVISION
from tiers.records import NamespaceNote, StoredRecord, StoredRecords, read_note

Standing = Literal["usable", "unusable", "can't tell"]


@dataclass
class Group:
    """The records of one namespace and size. `namespace`: as much of it as the tier lists; `used`:
    the oldest and the latest use, in seconds since the epoch, as far as known."""

    namespace: bytes
    payload_bytes: int
    note: NamespaceNote | None = None
    blocks: int = 0
    bytes: int = 0
    used: tuple[float, float] | None = None
    standing: Standing = "can't tell"
    why: str = ""

    def add(self, record: StoredRecord) -> None:
        self.blocks += 1
        self.bytes += record.size
        if record.used is not None:
            first, last = self.used or (record.used, record.used)
            self.used = min(first, record.used), max(last, record.used)


@dataclass(frozen=True)
class Inspection:
    """What a tier holds. `others`: whether another process has it open; None: it can't be seen."""

    groups: list[Group]
    others: bool | None


def inspect_tier(records: StoredRecords, is_encrypted: bool) -> Inspection:
    """List a tier's records by namespace and size, the largest group first. `is_encrypted`: its
    tier has encryption, so that what has a note is older. Raises what the tier raises."""
    found: dict[tuple[bytes, int], Group] = {}
    for piece in records.listed():
        for record in piece:
            if (key := (record.namespace, record.payload_bytes)) not in found:
                found[key] = Group(*key)
            found[key].add(record)
    # After the list: an engine notes its namespace before it stores, and has gone after that.
    others, texts = records.others(), records.notes()
    notes = {space: note for space, text in texts.items() if (note := read_note(text))}
    for group in found.values():
        # Its note, if just one namespace with a note begins so.
        fitting = [note for space, note in notes.items() if space.startswith(group.namespace)]
        group.note = fitting[0] if len(fitting) == 1 else None
        group.standing, group.why = judge(group, others, is_encrypted)
    return Inspection(sorted(found.values(), key=lambda group: -group.bytes), others)


def judge(group: Group, others: bool | None, is_encrypted: bool) -> tuple[Standing, str]:
    """Whether an engine can use these records, and why it is known or can't be."""
    note = group.note
    if not group.payload_bytes:
        return "can't tell", "no records of this kvtiers, perhaps of another version"
    if note is None:
        return "can't tell", "no note: encrypted, lost, or of an older kvtiers or another program"
    ends = "these blocks end with the engine that stored them"
    if is_encrypted:
        ends = "these blocks are in the clear, from before the tier was encrypted"
    elif note.lasts:
        if note.revision == KV_REVISION:
            return "usable", "by engines of this model and these settings"
        if note.revision is None:
            return "can't tell", "noted by an older kvtiers, which may have named it otherwise"
        return "can't tell", "engines of another version of kvtiers alone find these blocks"
    if others is None:
        return "can't tell", f"{ends}, and it can't be seen whether engines have the tier open"
    if others:
        return "can't tell", f"{ends}, and engines have the tier open"
    return "unusable", f"{ends}, and no engine has the tier open"
