"""Verifying a tier: every record is read and checked, at a bounded rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from tiers.concurrency.rate_limit import RateLimit
from tiers.records import Finding, StoredRecord, StoredRecords, Use, ignore, in_batches

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
    report = Verification()

    def of_this_format() -> Iterator[StoredRecord]:
        for record in chain.from_iterable(records.listed()):
            report.strange += not record.payload_bytes
            if record.payload_bytes:
                yield record

    for batch, findings in read_in_turn(records, of_this_format(), rate):
        damaged = []
        for record, finding in zip(batch, findings, strict=True):
            report.records += finding.state != "gone"
            report.gone += finding.state == "gone"
            report.bytes += record.size
            if finding.state == "damaged":
                damaged.append(record)
                if len(report.found) < NAMED:
                    report.found.append((record.name.hex(), finding.why))
        report.damaged += len(damaged)
        if drops and damaged:
            report.dropped += records.drop_damaged(damaged)
        progress(report.records, report.bytes)
    return report


def read_in_turn(
    records: StoredRecords, some: Iterable[StoredRecord], rate: float | None, use: Use = ignore
) -> Iterator[tuple[list[StoredRecord], list[Finding]]]:
    """Read records in batches, at `rate` bytes a second at most; each batch, and its findings."""
    limit = RateLimit(rate)
    most = BATCH_BYTES if rate is None else max(1, int(rate * BATCH_SECONDS))
    for batch in in_batches(some, most):
        limit.take(sum(record.size for record in batch))
        yield batch, records.read(batch, use)
