"""Which part of kvtiers saturates first, at how many times a trace's rate.

    python -m bench.scale TRACE [--result bench/results/FILE] [--write]

Counts what a trace asks for in a second, for a model of 8B on one GPU and one of 70B on eight, and
holds it against what each part was measured to do in a result of `python -m bench all`. `--write`
puts the tables into docs/scale.md. All of the trace goes through one engine that caches nothing
itself, and every tier holds all that it ever stored: the most that any tier could be asked for.
The last table is of a fleet over one shared tier: its engines bring as much as each can compute.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.models import kv_bytes_per_token
from bench.report import Row, number, read_json
from bench.tables import CHECKOUT, newest, put_in
from tiers.remote.packs.pack import PACK_BYTES
from tiers.remote.packs.search import FIRST_PROBES, PROBES
from tiers.traces.open_trace import open_trace
from tiers.traces.trace import TraceRequest

PAGE = CHECKOUT / "docs" / "scale.md"
BEGIN, END = "<!-- made by python -m bench.scale -->", "<!-- /made -->"
BLOCK_TOKENS = 16
DECIDED = 8192
"""Blocks of the prompt in the rows of the suite `scheduler`."""
HARDWARE = 0.9
"""A part that does this much of its limit is as fast as the hardware."""
DISK_BYTES = 30 * 10**12
STEPS = 50
"""Steps of an engine in a second, of 20 ms each: assumed, since no trace tells."""
LOOKED_UP = 128 * 8
"""Names in a request of the suite `lookups` to Valkey: of blocks, in eight ranks."""
ENGINES, ENGINE_TOKENS = 1000, 20_000
"""The fleet, and the prompt tokens that each of its engines computes in a second: assumed."""
DAY, MONTH = 86_400, 30 * 86_400
PRICE_GB_MONTH, PRICE_PUT, PRICE_GET = 0.023, 0.005 / 1000, 0.0004 / 1000
"""Dollars: S3 Standard's list prices in us-east-1, 2026."""
FLEET_HEAD = (
    "| model | stored | GB/s stored | GB/s loaded | TB in a day | "
    "Redis servers that take the bytes | that answer for names | "
    "object PUT/s | GET/s | object store, a month |",
    "|---|---|---|---|---|---|---|---|---|---|",
)
HEAD = (
    "| part | used at the trace's rate | measured | full at | limit |",
    "|---|---|---|---|---|",
)
MODELS = (("8B, TP 1", "llama-3.1-8b", 1), ("70B, TP 8", "llama-3.1-70b", 8))


class Traffic(NamedTuple):
    """What a trace asks for in a second."""

    requests: float
    asked: float
    """Prompt tokens."""
    loaded: float
    """Prompt tokens, in whole blocks of the trace, that came before."""
    stored: float
    """Tokens of new blocks, and of answers."""

    @classmethod
    def of(cls, trace: Iterable[TraceRequest], block_tokens: int, threshold: int = 1) -> Traffic:
        """Count them, where a block is stored from its request number `threshold` on; answers are,
        if that is the first. Raises ValueError for a trace of no duration."""
        asked_for: Counter[int] = Counter()
        count = asked = loaded = stored = 0
        first = last = 0.0
        for request in trace:
            first = request.timestamp if not count else first
            last = max(last, request.timestamp)
            known = 0
            blocks = request.blocks
            while known < len(blocks) and asked_for[blocks[known]] >= threshold:
                known += 1
            hit = min(known * block_tokens, request.input_length)
            asked_for.update(dict.fromkeys(blocks, 1))
            count, asked, loaded = count + 1, asked + request.input_length, loaded + hit
            if threshold == 1:
                stored += request.input_length - hit + request.output_length
            else:
                stored += block_tokens * sum(asked_for[block] == threshold for block in blocks)
        if last <= first:
            raise ValueError("a trace of one moment has no rate")
        seconds = (last - first) / 1000
        return cls(count / seconds, asked / seconds, loaded / seconds, stored / seconds)


@dataclass(frozen=True)
class Part:
    """One part of kvtiers. `used`, `able`: per second, in `unit`. `limit`: what share of the
    hardware's limit it was measured to reach; None: nothing was measured beside it. `of_device`:
    on a GPU its figure is another, and a result of a machine without one does not have it."""

    name: str
    used: float
    able: float
    unit: str
    limit: float | None = None
    of_device: bool = False

    @property
    def times(self) -> float:
        """At how many times the trace's rate it saturates."""
        return self.able / self.used


def parts(traffic: Traffic, model: str, ranks: int, rows: Sequence[Row]) -> Iterator[Part]:
    """The parts that a model's KV goes through, by what was measured."""
    found = {(row.suite, row.case): row for row in rows if row.ours is not None}
    blocks = traffic._replace(
        **{name: getattr(traffic, name) / BLOCK_TOKENS for name in ("asked", "loaded", "stored")}
    )
    yield Part("scheduler: prompts, one core", _scheduler(blocks, ranks, found), 1.0, "s")
    yield from _operations(blocks, ranks, found)
    token = kv_bytes_per_token(model)
    kib = token // ranks * BLOCK_TOKENS >> 10
    flows = (("store", "gather", traffic.stored), ("load", "scatter", traffic.loaded))
    for verb, move, tokens in flows:
        row = found[_named(found, "cpu", f"{move} 64 blocks")]
        used = tokens * token / ranks / 1e9
        name = f"{verb}: {move} of one rank"
        yield Part(name, used, _ours(row), "GB/s", row.of_limit, of_device=True)
    for kind, place, beside in (
        ("disk", "disk, direct, ", "{}, direct, 64"),
        ("remote", "redis, ", "{} 64 blocks of 2048 KiB"),
    ):
        for verb, _, tokens in flows:
            row = found[_nearest(found, kind, f"{verb}, {place}blocks of", kib)]
            limit = found[_named(found, kind, beside.format(verb))].of_limit
            name = f"{verb}: one {'disk' if kind == 'disk' else 'Redis'}"
            yield Part(name, tokens * token / 1e9, _ours(row), "GB/s", limit)


def _operations(
    blocks: Traffic, ranks: int, found: Mapping[tuple[str, str], Row]
) -> Iterator[Part]:
    """What costs by its number, not by its bytes: steps, and names that stores are asked for."""

    def row(suite: str, start: str) -> Row:
        return found[_named(found, suite, start)]

    for who, start in (
        ("scheduler", f"scheduler, {ranks} ranks, encrypted, 50,000 "),
        ("worker", "worker, 50,000 "),
    ):
        yield Part(f"{who}: steps", STEPS, 1e3 / _ours(row("steps", start)), "steps")
    asked = row("lookups", "hits of valkey, 8 ranks, 128 blocks, asked for 1 ").limit or 0.0
    yield Part("look-up: one Redis", blocks.asked * ranks, asked * LOOKED_UP, "names")
    replaced = 1e6 / _ours(row("disk", "index: replacing, "))
    yield Part("store: index of one disk", blocks.stored * ranks, replaced, "blocks")


def _scheduler(blocks: Traffic, ranks: int, found: Mapping[tuple[str, str], Row]) -> float:
    """Seconds of its thread in a second: it decides, begins loads, and gives orders."""

    def cost(start: str) -> float:
        """Seconds of a block."""
        row = found[_named(found, "scheduler", start)]
        unit = {"us/block": 1e-6, "ms": 1e-3 / DECIDED}[row.unit]
        return _ours(row) * unit

    in_cpu = cost(f"decide {DECIDED} blocks, in cpu")
    # An index is asked for every rank's part of a block.
    on_disk = ranks * cost(f"decide {DECIDED} blocks, on disk")
    begun = cost("update_state_after_alloc")
    ordered = cost("build_connector_meta")
    return (
        blocks.asked * (in_cpu + on_disk)
        + blocks.loaded * begun
        + (blocks.loaded + blocks.stored) * ordered
    )


def _ours(row: Row) -> float:
    assert row.ours is not None
    return row.ours


def _named(found: Iterable[tuple[str, str]], suite: str, start: str) -> tuple[str, str]:
    """The case that begins so. Raises KeyError."""
    for key in found:
        if key[0] == suite and key[1].startswith(start):
            return key
    raise KeyError(f"{suite}: {start}")


def _nearest(found: Iterable[tuple[str, str]], suite: str, start: str, kib: int) -> tuple[str, str]:
    """The case of blocks of about this size."""
    sizes = {
        int(match[1]): key
        for key in found
        if key[0] == suite and (match := re.fullmatch(re.escape(start) + r" (\d+) KiB", key[1]))
    }
    if not sizes:
        raise KeyError(f"{suite}: {start}")
    return sizes[min(sizes, key=lambda size: abs(size - kib))]


def tables(trace: Path, result: Path) -> str:
    """The page's part for this trace and this result. Raises what reading them raises."""
    opened = open_trace(trace)
    traffic = Traffic.of(opened, opened.header.block_tokens)
    machine, rows = read_json(result)
    link = f"[{result.stem}](../bench/results/{result.name})"
    said = [
        f"Measured on {machine['cores']} cores: {link}. In a second the trace brings "
        f"{traffic.requests:.1f} requests with {traffic.asked:,.0f} tokens. Of those "
        f"{traffic.loaded:,.0f} came before; {traffic.stored:,.0f} are new, with the answers."
    ]
    for title, model, ranks in MODELS:
        found = parts(traffic, model, ranks, rows)
        measured = (part for part in found if machine["gpu"] or not part.of_device)
        each = sorted(measured, key=lambda part: part.times)
        said.append(f"### {title}\n\n{_sizes(traffic, model, ranks, rows)}")
        said.append("\n".join((*HEAD, *map(_line, each))))
    twice = Traffic.of(open_trace(trace), opened.header.block_tokens, threshold=2)
    said.append(
        f"### {ENGINES:,} engines\n\nEach computes {ENGINE_TOKENS:,} prompt tokens a second, of "
        "such prompts, over one shared tier that keeps a day."
    )
    rules = {"all": traffic, "from its 2nd request": twice}
    said.append("\n".join((*FLEET_HEAD, *fleet(rules, rows))))
    return "\n\n".join(said)


def fleet(traffics: Mapping[str, Traffic], rows: Sequence[Row]) -> Iterator[str]:
    """Lines about `ENGINES` engines over one shared tier, for each rule of what is stored."""
    found = {(row.suite, row.case): row for row in rows if row.ours is not None}
    redis = _ours(found[_nearest(found, "remote", "store, redis, blocks of", 2048)])
    names = (
        found[_named(found, "lookups", "hits of valkey, 8 ranks, 128 blocks, asked")].limit or 0.0
    ) * LOOKED_UP
    for title, model, ranks in MODELS:
        token = kv_bytes_per_token(model)
        pack = max(1, PACK_BYTES // (token // ranks * BLOCK_TOKENS)) * BLOCK_TOKENS
        for rule, traffic in traffics.items():
            scale = ENGINES * ENGINE_TOKENS / traffic.asked
            stored, loaded = (scale * tokens for tokens in (traffic.stored, traffic.loaded))
            puts = ranks * stored / pack
            # Indexes that a look-up reads, most of a prompt's search for its end, and each load's.
            gets = ranks * (scale * traffic.requests * (FIRST_PROBES + PROBES) + loaded / pack)
            held = stored * token * DAY
            price = held / 1e9 * PRICE_GB_MONTH + MONTH * (puts * PRICE_PUT + gets * PRICE_GET)
            cells = (
                title,
                rule,
                f"{stored * token / 1e9:,.0f}",
                f"{loaded * token / 1e9:,.0f}",
                f"{held / 1e12:,.0f}",
                f"{stored * token / 1e9 / redis:,.0f}",
                f"{scale * traffic.asked / BLOCK_TOKENS * ranks / names:,.0f}",
                f"{puts:,.0f}",
                f"{gets:,.0f}",
                f"${price / 1e6:,.2f} million",
            )
            yield "| " + " | ".join(cells) + " |"


def _sizes(traffic: Traffic, model: str, ranks: int, rows: Sequence[Row]) -> str:
    """How large and how many its blocks are."""
    token = kv_bytes_per_token(model)
    block = token // ranks * BLOCK_TOKENS
    asked = ranks * traffic.asked / BLOCK_TOKENS
    held = DISK_BYTES / block
    each = next(_ours(row) for row in rows if row.case.startswith("index: memory, "))
    return (
        f"{token >> 10} KiB of KV a token, {block >> 10} KiB in a rank's part of {BLOCK_TOKENS}. "
        f"{asked:,.0f} such blocks are asked for in a second, over all ranks. A disk of "
        f"{DISK_BYTES / 1e12:.0f} TB holds {held / 1e6:.0f} million: {held * each / 1e9:.1f} GB of "
        "index, where all of it is looked up."
    )


def _line(part: Part) -> str:
    whose = "" if part.limit is None else "hardware" if part.limit >= HARDWARE else "ours"
    if part.limit is not None:
        whose += f" ({part.limit:.2f} of it)"
    used, able = (f"{number(x)} {part.unit}" for x in (part.used, part.able))
    return f"| {part.name} | {used} | {able} | {number(part.times)} x | {whose} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--result", type=Path, default=max(newest()))
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args(arguments)
    made = tables(asked.trace, asked.result)
    print(made)
    if asked.write:
        PAGE.write_text(put_in(PAGE.read_text(), made, BEGIN, END))


if __name__ == "__main__":
    main()
