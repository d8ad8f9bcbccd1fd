"""Moving what a tier holds: export to an archive, import into another tier. Both go on where they
were interrupted, since what is there already is left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

from spec.offloading import StoreSpec, read_keys
from tiers.block import Header, digest
from tiers.data.archive import ArchiveHead, ArchiveReader, ArchiveWriter, Frame, PackedRecord, pack
from tiers.data.verification import Progress, read_in_turn
from tiers.errors import RecordError
from tiers.host.scratch import Scratch
from tiers.records import StoredRecords, read_note
from tiers.store import Counts, GatheredBlock, TierStore, batch_blocks, capability, each
from tiers.wrappers.opening import open_stored

HIDDEN_BYTES = 32
"""Of an encrypted block's key (`HiddenNames`): one with an engine's hash has more, or fewer."""


@dataclass
class Transfer:
    """What a transfer moved. `held`: there already. `gone`: evicted meanwhile. `damaged`, `plain`:
    left out, the latter of an encrypted tier. `refused`: for want of room. `evicted`: to make room,
    of what was moved or there already."""

    moved: int = 0
    bytes: int = 0
    held: int = 0
    gone: int = 0
    damaged: int = 0
    plain: int = 0
    refused: int = 0
    evicted: int = 0


def key_marks(spec: StoreSpec) -> list[str]:
    """What stands for a tier's encryption keys in an archive; none: it has no encryption. Raises
    ValueError and OSError if they can't be read."""
    if spec.encryption is None:
        return []
    from tiers.wrappers.encryption import key_mark

    return [key_mark(key) for key in read_keys(spec.encryption.key_file)]


def export_tier(
    records: StoredRecords, path: Path, keys: Sequence[str], rate: float | None, progress: Progress
) -> Transfer:
    """Write what a tier holds now to an archive, the least recently used first. Takes some 600
    bytes of memory a block. `keys`: marks of the tier's encryption keys."""
    report, packed = Transfer(), dict[bytes, PackedRecord]()

    def use(header: Header, stored: memoryview) -> None:
        if not keys or len(header.key) == HIDDEN_BYTES:
            packed[digest(header.key)] = pack(header, stored)

    notes = {
        space.hex(): text.decode() for space, text in records.notes().items() if read_note(text)
    }
    head = ArchiveHead(keys=tuple(keys), notes={} if keys else notes)
    with closing(ArchiveWriter(path, head)) as archive:
        # A tier may list a record twice.
        every = {r.digest: r for piece in records.listed() for r in piece if r.payload_bytes}
        plan = [record for name, record in every.items() if name not in archive.held]
        report.held = len(every) - len(plan)
        plan.sort(key=lambda record: record.order)
        for batch, findings in read_in_turn(records, plan, rate, use):
            # In its order, though the tier reads and packs it in threads.
            for record, finding in zip(batch, findings, strict=True):
                if (whole := packed.pop(record.digest, None)) is not None:
                    archive.add(whole)
                    report.moved += 1
                    report.bytes += record.size
                report.gone += finding.state == "gone"
                report.damaged += finding.state == "damaged"
                report.plain += finding.state == "whole" and whole is None
            progress(report.moved, report.bytes)
        archive.finish()
    return report


def import_archive(archive: ArchiveReader, spec: StoreSpec, progress: Progress) -> Transfer:
    """Put an archive's records into a tier under their own keys, in the form that they are stored
    in, up to the archive's end, or to damage. Raises what the tier raises; import again then."""
    report = Transfer()
    opened: dict[int, tuple[TierStore, memoryview]] = {}
    with ExitStack() as stack:
        for batch in _batches(archive.frames()):
            size = batch[0].header.payload_bytes
            if size not in opened:
                store = stack.enter_context(closing(open_stored(spec, size)))
                memory = stack.enter_context(Scratch(size * batch_blocks(size)).borrow())
                opened[size] = store, memory
            _put(archive, *opened[size], batch, report)
            progress(report.moved, report.bytes)
        counting = (capability(store, Counts) for store, _ in opened.values())
        report.evicted = sum(one.counts().evicted for one in counting if one is not None)
    return report


def import_notes(archive: ArchiveReader, records: StoredRecords) -> None:
    """Keep the archive's notes of namespaces that have none in the tier: what its engines note is
    later."""
    held = records.notes()
    for space, text in archive.head.notes.items():
        if bytes.fromhex(space) not in held and read_note(text.encode()) is not None:
            records.note(bytes.fromhex(space), text.encode())


def _batches(frames: Iterator[Frame]) -> Iterator[list[Frame]]:
    """Frames that follow each other, of payloads of one length, as many as one `put` takes."""
    for size, same in groupby(frames, lambda frame: frame.header.payload_bytes):
        while batch := list(islice(same, batch_blocks(size))):
            yield batch


def _put(
    archive: ArchiveReader,
    store: TierStore,
    memory: memoryview,
    batch: list[Frame],
    report: Transfer,
) -> None:
    names = [frame.header.key for frame in batch]
    held = each("has", store.has(names), len(names))
    report.held += sum(held)
    missing = [frame for frame, is_held in zip(batch, held, strict=True) if not is_held]
    size = batch[0].header.payload_bytes
    blocks = []
    for place, frame in enumerate(missing):
        payload = memory[place * size : (place + 1) * size]
        try:
            blocks.append(_block(archive, frame, payload))
        except RecordError:
            report.damaged += 1
    if not blocks:
        return
    # A store takes the first block of a call for the one used last.
    stored = each("put", store.put([block.readonly() for block in blocks[::-1]]), len(blocks))
    report.moved += sum(stored)
    report.bytes += sum(stored) * size
    report.refused += len(stored) - sum(stored)


def _block(archive: ArchiveReader, frame: Frame, payload: memoryview) -> GatheredBlock:
    """Fill the payload from a frame. Raises RecordError."""
    header, stored = frame.header, archive.stored(frame)
    if header.codec:
        from tiers.codec import decode

        decode(header.codec, stored, payload)
        return GatheredBlock(header.key, payload, digest(payload))
    payload[:] = stored
    return GatheredBlock(header.key, payload, header.checksum)
