"""What a tier holds and no engine can use any more, and removing it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tiers.data.inspection import Group, Inspection
from tiers.data.verification import Progress
from tiers.records import StoredRecords
from tiers.wrappers.journals import forget as forget

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
