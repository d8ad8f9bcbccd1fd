"""`kvtiers inspect`, `verify`, `scrub`, `export`, `import` and `gc`: what a tier holds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from spec.errors import one_line, one_of, reason_of
from spec.text import format_size, span
from tiers.cli.arguments import DASH, ChainFile, bar, check_places, parsed, refused
from tiers.errors import KVTiersError, TierUnusable

if TYPE_CHECKING:
    from spec.offloading import StoreSpec
    from tiers.data.inspection import Group, Inspection
    from tiers.data.transfer import Transfer
    from tiers.data.verification import Progress, Verification
    from tiers.records import StoredRecords

TierOption = Annotated[
    str | None,
    typer.Option("--tier", metavar="NAME", help="Only this tier. Unset: each that lists blocks."),
]
RateOption = Annotated[
    str | None,
    typer.Option(
        help="Read at most this much, like 200MB/s, or all: as fast as it goes. Unset: 200MB/s "
        "beside engines, all where no other process has the tier open."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
BESIDE = 200e6
"""Bytes a second that are read beside engines unless --rate says otherwise."""
SHOWN = 20
"""Damaged blocks that have a line; on a bad disk there are as many as the disk holds."""


def inspect(file: ChainFile, tier: TierOption = None, as_json: AsJson = False) -> None:
    """Show what tiers hold: by model, size and last use, and what no engine can use any more.

    Reads no block, changes nothing, and runs beside engines.

    \b
    kvtiers inspect chain.yaml
    kvtiers inspect chain.yaml --tier disk --json
    """
    from tiers.data.inspection import inspect_tier

    def inspected(spec: StoreSpec, records: StoredRecords) -> _Result:
        found = inspect_tier(records, spec.encryption is not None)
        rows = [_group_json(group) for group in found.groups]
        lines = _inspection_lines(spec.tier_name, found)
        return _Result({"groups": rows, "others": found.others}, [*lines])

    _each(file, tier, as_json, inspected)


def verify(
    file: ChainFile, tier: TierOption = None, rate: RateOption = None, as_json: AsJson = False
) -> None:
    """Read every block of a tier and check key, length and checksum.

    Changes nothing, counts as no use of a block, and runs beside engines. Ends with 1 if a block is
    damaged, which engines never serve, or a tier can't be read. Names 20 of them; --json more.

    \b
    kvtiers verify chain.yaml
    kvtiers verify chain.yaml --tier disk --rate 200MB/s
    """
    _verify(file, tier, rate, as_json, drops=False)


def scrub(
    file: ChainFile, tier: TierOption = None, rate: RateOption = None, as_json: AsJson = False
) -> None:
    """Verify a tier and drop exactly the damaged blocks, beside engines too.

    Each is read once more before it is dropped. Ends with 1 if damage is left.

    \b
    kvtiers scrub chain.yaml --tier disk
    """
    _verify(file, tier, rate, as_json, drops=True)


def _is_file(archive: Path) -> Path:
    """Refuse the dash: an archive that was cut off is continued, and so is a file."""
    if archive == DASH:
        raise refused("-: an archive is a file, in which a command goes on; write its path")
    return archive


ArchiveFile = Annotated[
    Path,
    typer.Argument(
        metavar="ARCHIVE", help="The archive's file.", show_default=False, callback=_is_file
    ),
]


def export(
    file: ChainFile, archive: ArchiveFile, tier: TierOption = None, rate: RateOption = None
) -> None:
    """Write what a tier holds to an archive, to move a warm cache to another host.

    Runs beside engines. Killed anywhere, it goes on where it was when it is run again. Damaged
    blocks are left out, and it ends with 1; so it does, and writes nothing, where a file of
    this name is there. Encrypted blocks stay encrypted.

    \b
    kvtiers export chain.yaml warm.kvt --tier disk
    """
    from tiers.data.archive import require_new
    from tiers.data.transfer import export_tier, key_marks

    spec, wanted = _tier(file, tier), _parsed(rate)
    check_places(archive, keep=[file])
    require_new(archive)
    with _records(spec) as records, _bar(f"{spec.tier_name} is exported") as progress:
        report = export_tier(records, archive, key_marks(spec), _limit(wanted, records), progress)
    typer.echo(_transfer_line(f"{archive}", report))
    if report.damaged:
        typer.echo(f"kvtiers verify {file} names the damaged blocks", err=True)
        raise typer.Exit(1)


def import_(file: ChainFile, archive: ArchiveFile, tier: TierOption = None) -> None:
    """Put an archive's blocks into a tier, under the keys and checksums that they have.

    Runs beside engines. Killed anywhere, it goes on when it is run again: what the tier holds is
    left out. Only import what you would let write into the tier.

    \b
    kvtiers import chain.yaml warm.kvt --tier disk
    """
    from tiers.data.archive import ArchiveReader
    from tiers.data.transfer import import_archive, import_notes

    spec = _tier(file, tier)
    if not archive.exists():
        raise refused(f"{archive}: found no such file; kvtiers export writes it")
    bar = _bar(f"{spec.tier_name} is filled")
    with closing(ArchiveReader(archive)) as reader, bar as progress:
        _require_keys(archive, reader.head.keys, spec)
        report = import_archive(reader, spec, progress)
        with _records(spec) as records:
            import_notes(reader, records)
    typer.echo(_transfer_line(spec.tier_name, report))
    if not reader.is_whole:
        typer.echo(
            f"{archive}: it ends early, or is damaged at byte {reader.end:,}: export again, which "
            "goes on there, and import again",
            err=True,
        )
    if report.damaged or report.refused or not reader.is_whole:
        raise typer.Exit(1)


def gc(
    file: ChainFile,
    tier: TierOption = None,
    unused: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Also what no engine has opened, stored or loaded for so long, like 30d.",
        ),
    ] = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option(metavar="HEX", help="Also a namespace that inspect shows; may be repeated."),
    ] = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Drop them; without it they are only shown.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show, or drop, what a tier holds and no engine can use any more.

    These are blocks that ended with their engine: stored after a reset of its caches, or of weights
    that can't be identified. What may be of use stays, unless --unused or --namespace says it.

    \b
    kvtiers gc chain.yaml
    kvtiers gc chain.yaml --tier disk --unused 30d --delete
    """
    from spec.fields import parse_duration
    from spec.load import load_chain
    from tiers.data.inspection import find_garbage, forget, inspect_tier, remove_garbage

    age = None if unused is None else parsed("--unused", unused, parse_duration)
    spaces = [_space(text) for text in namespace or ()]
    events = load_chain(file).events.folder

    def cleaned(spec: StoreSpec, records: StoredRecords) -> _Result:
        garbage = find_garbage(inspect_tier(records, spec.encryption is not None), age, spaces)
        dropped = (0, 0)
        if delete:  # first, since the blocks that an interrupted gc leaves are found again
            forget(spec, events, [*spaces, *(group.namespace for group, _ in garbage)])
        if delete and garbage:
            with _bar(f"{spec.tier_name} is cleaned") as progress:
                dropped = remove_garbage(records, [group for group, _ in garbage], progress)
        rows = [{**_group_json(group), "why": why} for group, why in garbage]
        shown = {"garbage": rows, "dropped": dropped[0], "bytes": dropped[1]}
        return _Result(shown, [*_garbage_lines(spec.tier_name, garbage, dropped[0], delete)])

    _each(file, tier, as_json, cleaned)


def _space(text: str) -> bytes:
    try:
        space = bytes.fromhex(text)
    except ValueError:
        space = b""
    if len(space) < 8:
        raise refused(f"--namespace {text}: write 16 hex digits or more, as inspect shows them")
    return space


def _garbage_lines(
    name: str, garbage: Sequence[tuple[Group, str]], dropped: int, delete: bool
) -> Iterator[str]:
    for group, why in garbage:
        size = f"{group.blocks:,} blocks, {format_size(group.bytes)}"
        yield f"{name}: namespace {group.namespace.hex()}: {size}: {why}"
    if not garbage:
        yield f"{name}: nothing to drop"
    elif delete:
        yield f"{name}: {dropped:,} blocks dropped"
    else:
        yield f"{name}: nothing was dropped; --delete drops these"


def _tier(file: Path, name: str | None) -> StoreSpec:
    tiers = _tiers(file, name)
    if len(tiers) > 1:
        raise refused(f"{file}: name a tier by --tier: {one_of([one.tier_name for one in tiers])}")
    return tiers[0]


def _require_keys(archive: Path, marks: Sequence[str], spec: StoreSpec) -> None:
    """Refuse an archive that no engine on the tier could read."""
    from tiers.data.transfer import key_marks

    name, ours = spec.tier_name, key_marks(spec)
    if bool(marks) != bool(ours):
        what, has = ("encrypted", "has no") if marks else ("not encrypted", "has")
        raise refused(f"{archive}: its blocks are {what}, and tier {name!r} {has} encryption")
    if not set(marks) <= set(ours):
        raise refused(
            f"{archive}: its blocks are encrypted with keys that are not in "
            f"{spec.encryption and spec.encryption.key_file}; add them to that file"
        )


def _transfer_line(name: str, report: Transfer) -> str:
    counts = (
        (report.held, "there already"),
        (report.gone, "evicted meanwhile"),
        (report.damaged, "damaged and left out"),
        (report.plain, "not encrypted and left out"),
        (report.refused, "without room"),
        (report.evicted, "evicted to make room"),
    )
    line = f"{name}: {report.moved:,} blocks, {format_size(report.bytes)}"
    return ", ".join([line, *(f"{count:,} {what}" for count, what in counts if count)])


def _verify(file: Path, tier: str | None, rate: str | None, as_json: bool, drops: bool) -> None:
    from tiers.data.verification import verify_tier

    wanted = _parsed(rate)

    def verified(spec: StoreSpec, records: StoredRecords) -> _Result:
        limit, began = _limit(wanted, records), time.monotonic()
        with _bar(f"{spec.tier_name} is read") as progress:
            report = verify_tier(records, limit, progress, drops=drops)
        seconds = time.monotonic() - began
        lines = _verification_lines(spec.tier_name, report, seconds)
        shown = {**vars(report), "seconds": round(seconds, 3)}
        return _Result(shown, [*lines], report.damaged > report.dropped)

    _each(file, tier, as_json, verified)


class _Result(NamedTuple):
    """What came of one tier: as JSON takes it, and as lines; whether it is a finding."""

    shown: dict[str, Any]
    lines: list[str]
    is_finding: bool = False


def _each(
    file: Path, tier: str | None, as_json: bool, work: Callable[[StoreSpec, StoredRecords], _Result]
) -> None:
    """Do `work` on each tier and print what came of it. Ends with 1 for a finding, and for a tier
    that can't be read, which is named; the others have their turn."""
    shown: dict[str, Any] = {}
    ends = 0
    for spec in _tiers(file, tier):
        try:
            with _records(spec) as records:
                result = work(spec, records)
        except (KVTiersError, OSError) as error:
            typer.echo(f"{spec.tier_name}: {reason_of(error)}", err=True)
            ends = 1
            continue
        ends |= result.is_finding
        shown[spec.tier_name] = result.shown
        for line in () if as_json else result.lines:
            typer.echo(line)
    if as_json:
        typer.echo(json.dumps(shown, indent=1))
    if ends:
        raise typer.Exit(1)


def _parsed(rate: str | None) -> float | str | None:
    from spec.fields import parse_rate

    if rate is None or rate == "all":
        return rate
    return parsed("--rate", rate, parse_rate)


def _limit(wanted: float | str | None, records: StoredRecords) -> float | None:
    if wanted is None:
        return None if records.others() is False else BESIDE
    return None if isinstance(wanted, str) else wanted


def _tiers(file: Path, name: str | None) -> list[StoreSpec]:
    """The tiers to work on: the one of that name, or all that can list what they hold."""
    from spec.load import load_chain
    from spec.offloading import StoreSpec

    tiers = load_chain(file).tiers
    stores = [tier for tier in tiers if isinstance(tier, StoreSpec)]
    listing = [tier for tier in stores if type(tier).records is not StoreSpec.records]
    if chosen := [tier for tier in listing if name in (None, tier.tier_name)]:
        return chosen
    names = [tier.tier_name for tier in listing]
    if not names:
        raise refused(f"{file}: none of its tiers can list what it holds, as disk and redis can")
    if any(tier.tier_name == name for tier in tiers):
        raise refused(f"--tier {name}: its type can't list what it holds; use {one_of(names)}")
    raise refused(f"--tier {name}: no such tier; use {one_of(names)}")


def _records(spec: StoreSpec) -> closing[StoredRecords]:
    records = spec.records()
    if records is None:
        raise TierUnusable(f"tier {spec.tier_name!r} can't list what it holds, as it is set")
    return closing(records)


@contextmanager
def _bar(text: str) -> Iterator[Progress]:
    with bar(text) as update:

        def show(records: int, size: int) -> None:
            update(description=f"{text}: {records:,} blocks, {format_size(size)}")

        yield show


def _verification_lines(name: str, report: Verification, seconds: float) -> Iterator[str]:
    for key, why in report.found[:SHOWN]:
        yield f"{name}: damaged: {key}: {why}"
    if report.damaged > SHOWN:
        more = f"{report.damaged - SHOWN:,} more are damaged"
        yield f"{name}: {more}; --json names {len(report.found):,} of them"
    pace = format_size(int(report.bytes / max(seconds, 1e-6)))
    counts = (
        (report.dropped, "dropped"),
        (report.gone, "evicted meanwhile"),
        (report.strange, "are no records of this format"),
    )
    size = f"{report.records:,} blocks, {format_size(report.bytes)}, {pace}/s"
    line = f"{name}: {size}: {report.damaged:,} damaged"
    yield ", ".join([line, *(f"{count:,} {what}" for count, what in counts if count)])


def _group_json(group: Group) -> dict[str, Any]:
    shown = asdict(group)
    first, last = shown.pop("used") or (None, None)
    return {**shown, "namespace": group.namespace.hex(), "first_used": first, "last_used": last}


def _inspection_lines(name: str, found: Inspection) -> Iterator[str]:
    total = sum(group.bytes for group in found.groups)
    blocks = sum(group.blocks for group in found.groups)
    open_ = {True: "open in another process", False: "not open elsewhere", None: "shared"}
    yield f"{name}: {blocks:,} blocks, {format_size(total)}, {open_[found.others]}"
    for group in found.groups:
        note = group.note
        whose = f"namespace {group.namespace.hex()}"
        if note is not None:
            salted = ", salted" if note.salted else ""
            rank = f", rank {note.rank} of {note.ranks}" if note.ranks > 1 else ""
            layout = f"{note.block_tokens} tokens a block, layout {note.layout[:8]}"
            whose = one_line(f"{note.model}, vLLM {note.engine}, {layout}{rank}{salted}, {whose}")
        yield f"  {whose}"
        size = f"{group.blocks:,} blocks of {group.payload_bytes:,} B, {format_size(group.bytes)}"
        if group.used is not None:
            first, last = (span(max(0.0, time.time() - moment)) for moment in group.used)
            size += f", last used {last} ago, the oldest {first}"
        yield f"    {size}"
        yield f"    {group.standing}: {group.why}"
