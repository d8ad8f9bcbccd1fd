"""Verifying a tier: every record is read and checked, at a bounded rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tiers.concurrency.rate_limit import RateLimit
from tiers.records import StoredRecord, StoredRecords, in_batches

BATCH_BYTES = 64 << 20
BATCH_SECONDS = 0.005
"""A batch at a bounded rate takes this long at most, so that engines get their turn between."""
NAMED = 1000
"""Damaged records that a report names; more are counted."""

Progress = Callable[[int, int], object]
"""Called with the records and bytes read so far."""


@dataclass
class Verification:
    """What reading all records showed. `gone`: evicted or dropped since they were listed.
    `strange`: they lie among the records and are none of this format."""

    records: int = 0
    bytes: int = 0
    damaged: int = 0
    dropped: int = 0
    gone: int = 0
    strange: int = 0
    found: list[tuple[str, str]] = field(default_factory=list)
    """Names of damaged records in hex, the first `NAMED`, each with its damage."""


def verify_tier(
    records: StoredRecords, rate: float | None, progress: Progress, drops: bool = False
) -> Verification:
    """Read and check every record, at `rate` bytes a second at most; with `drops` drop those that
    are damaged. Raises what the tier raises."""
    report, limit = Verification(), RateLimit(rate)
    most = BATCH_BYTES if rate is None else max(1, int(rate * BATCH_SECONDS))
    for piece in records.listed():
        of_this_format = [record for record in piece if record.payload_bytes]
        report.strange += len(piece) - len(of_this_format)
        for batch in in_batches(of_this_format, most):
            size = sum(record.size for record in batch)
            limit.take(size)
            damaged = _read(records, batch, report)
            if drops and damaged:
                report.dropped += records.drop_damaged(damaged)
            report.bytes += size
            progress(report.records, report.bytes)
    return report


def _read(
    records: StoredRecords, batch: list[StoredRecord], report: Verification
) -> list[StoredRecord]:
    """Read a batch and count it; return which records are damaged."""
    damaged = []
    for record, finding in zip(batch, records.read(batch), strict=True):
        report.records += finding.state != "gone"
        report.gone += finding.state == "gone"
        if finding.state == "damaged":
            damaged.append(record)
            if len(report.found) < NAMED:
                report.found.append((record.name.hex(), finding.why))
    report.damaged += len(damaged)
    return damaged
