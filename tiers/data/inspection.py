"""What a tier holds, by namespace: whose it is, as far as it can tell, and what no engine can use
any more, which can be removed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tiers.block import KV_REVISION
from tiers.data.verification import Progress
from tiers.records import NamespaceNote, StoredRecord, StoredRecords, read_note
from tiers.wrappers.journals import forget as forget

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
        return "can't tell", "engines of another version of kvtiers alone find these blocks"
    if others is None:
        return "can't tell", f"{ends}, and it can't be seen whether engines have the tier open"
    if others:
        return "can't tell", f"{ends}, and engines have the tier open"
    return "unusable", f"{ends}, and no engine has the tier open"


STEP = 256
PAUSE = 0.005
"""Blocks dropped at once, and seconds between two steps, for engines that store meanwhile."""


def find_garbage(
    found: Inspection, unused: float | None = None, namespaces: Sequence[bytes] = ()
) -> list[tuple[Group, str]]:
    """The groups that no engine can use for sure; those that none has opened or used for `unused`
    seconds, as far as that is known; and those whose namespace begins as one of `namespaces`. Each
    with the reason."""
    since = None if unused is None else time.time() - unused
    return [(group, why) for group in found.groups if (why := _why(group, since, namespaces))]


def _why(group: Group, since: float | None, namespaces: Sequence[bytes]) -> str:
    if not group.payload_bytes:
        return ""  # it may be another program's
    if any(
        group.namespace.startswith(one) or one.startswith(group.namespace) for one in namespaces
    ):
        return "its namespace was named"
    if group.standing == "unusable":
        return group.why
    last = [group.used[1]] if group.used else []
    if group.note is not None:
        last.append(group.note.opened)
    # An engine that loads alone renews no note: where no times of loads are kept, nothing is old.
    if since is not None and group.used and max(last) < since:
        return "no engine has opened or used it for that long"
    return ""


def remove_garbage(
    records: StoredRecords, groups: Sequence[Group], progress: Progress
) -> tuple[int, int]:
    """Drop the records of these groups, and the notes of their namespaces; return how many, and
    their bytes. Raises what the tier raises; what is left is found again."""
    wanted = {(group.namespace, group.payload_bytes) for group in groups}
    count = size = 0
    for piece in records.listed():
        chosen = [record for record in piece if (record.namespace, record.payload_bytes) in wanted]
        for start in range(0, len(chosen), STEP):
            batch = chosen[start : start + STEP]
            records.drop(batch)
            count, size = count + len(batch), size + sum(record.size for record in batch)
            progress(count, size)
            time.sleep(PAUSE)
    for space in records.notes():
        if any(space.startswith(group.namespace) for group in groups):
            records.note(space, b"")
    return count, size
