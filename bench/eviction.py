"""How many blocks the CPU tier serves under each eviction policy, on a trace of real prompts.

    python -m bench.eviction [TRACE] [--requests N] [--sizes 0.5 1 5 20] [--step N] [--json FILE]

Sizes are in percent of the trace's distinct blocks. The default is the conversation trace of the
Mooncake project (Apache-2.0, https://github.com/kvcache-ai/Mooncake, FAST25-release/traces).

A hit is a block of the longest resident prefix of a prompt, which is loaded; the rest is stored, at
once or, as by an engine that computes it in steps, `--step` blocks at a time. The host pool and the
tier's manager are real and called as the scheduler half calls them, without bytes. `opt` knows the
future: it gives up what is used again last (Belady), and takes nothing that it would have to give
up for what it has.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from bench.main import Scale
from bench.report import Case
from spec.plugins import EVICTION, installed
from tiers.connector.scheduler.host_manager import HostManager
from tiers.connector.scheduler.lookups import Lookup
from tiers.contract.block_groups import leading
from tiers.cpu.spec import CpuSpec
from tiers.host.slots import SlotPool
from tiers.traces.open_trace import open_trace

TRACE = Path(__file__).parents[2] / "shared" / "traces" / "mooncake_conversation.jsonl"
POLICIES = tuple(installed(EVICTION))
SIZES = (0.5, 1.0, 5.0, 20.0)
STAGING = 4096
"""Slots beside the tier's: no store is dropped."""

Prompt = Sequence[bytes]


def prompts_of(trace: Path, requests: int | None = None) -> list[Prompt]:
    """The first so many prompts of a trace, or all, as keys of their full blocks."""
    some = islice(open_trace(trace), requests)
    return [[block.to_bytes(8, "little") for block in one.blocks] for one in some]


def replay(prompts: Sequence[Prompt], eviction: str, slots: int, step: int | None = None) -> int:
    """Hits of a policy, where a prompt is stored in steps of so many blocks, or in one."""
    pool = SlotPool(slots + STAGING)
    spec = CpuSpec.model_validate({"capacity": 1, "eviction": eviction})
    manager = HostManager(spec.residency(pool, slots), pool)
    hits = 0
    for keys in prompts:
        found = leading(manager.coverage(Lookup(), keys, range(len(keys))))
        hits += found
        loading = manager.prepare_load(keys[:found])
        manager.complete_load(loading)
        ends = [*range(found + step, len(keys), step), len(keys)] if step else [len(keys)]
        for start, end in zip([0, *ends], ends, strict=False):
            _store(pool, manager, keys, range(start, end))
    return hits


def _store(pool: SlotPool, manager: HostManager, keys: Prompt, offered: range) -> None:
    """Store what the tier lacks of this part of a prompt."""
    offers = keys[offered.start : offered.stop]
    lacking = zip(offered, manager.touch_and_list_missing(offers), strict=True)
    numbers = [number for number, lacks in lacking if lacks]
    claims = [pool.claim(keys[number]) for number in numbers]
    heads = manager.predecessors(keys, numbers)
    for number, claim in reversed(list(zip(numbers, claims, strict=True))):
        assert claim is not None, "the pool has room for every store"
        key = keys[number]
        manager.complete_store(key, claim.slot, True, heads.get(key))
        pool.release(claim.slot)


def optimum(prompts: Sequence[Prompt], slots: int) -> int:
    """Hits of one that knows the future."""
    kept: dict[bytes, tuple[int, int]] = {}
    by_use: list[tuple[int, int, bytes]] = []
    hits = 0
    for keys, next_uses in zip(prompts, _next_uses(prompts), strict=True):
        prefix = True
        for depth, (key, next_use) in enumerate(zip(keys, next_uses, strict=True)):
            prefix = prefix and key in kept
            hits += prefix
            kept.pop(key, None)
            if next_use is not None:
                # Of one prompt's blocks the last goes first: it is of no use without the others.
                kept[key] = (-next_use, -depth)
                heapq.heappush(by_use, (-next_use, -depth, key))
            while len(kept) > slots:
                use, deep, last = heapq.heappop(by_use)
                if kept.get(last) == (use, deep):
                    del kept[last]
    return hits


def _next_uses(prompts: Sequence[Prompt]) -> list[list[int | None]]:
    """For each block of each prompt, the number of the next prompt that has it."""
    last_seen: dict[bytes, int] = {}
    uses: list[list[int | None]] = []
    for number in range(len(prompts) - 1, -1, -1):
        uses.append([last_seen.get(key) for key in prompts[number]])
        last_seen.update(dict.fromkeys(prompts[number], number))
    return uses[::-1]


def measure(
    prompts: Sequence[Prompt], sizes: Sequence[float], step: int | None = None
) -> Iterator[dict[str, Any]]:
    """A row per size: slots, and hits of each policy and of the optimum."""
    distinct = len({key for keys in prompts for key in keys})
    for size in sizes:
        slots = max(1, int(distinct * size / 100))
        hits = {policy: replay(prompts, policy, slots, step) for policy in POLICIES}
        yield {"percent": size, "slots": slots, **hits, "opt": optimum(prompts, slots)}


def cases(scale: Scale, stack: ExitStack) -> Iterator[Case]:
    """The suite: hits of each policy in percent of all blocks asked for, beside the optimum's."""
    trace, requests = TRACE, 100 if scale.smoke else None
    if not trace.exists():
        why = f"there is no trace {trace.name} beside the checkout, in {trace.parent.name}/"
        for policy in POLICIES:
            yield Case("eviction", policy, "% hits", None, why=why)
        return
    prompts = prompts_of(trace, requests)
    blocks = sum(map(len, prompts))
    for row in measure(prompts, SIZES):
        percent = {name: 100 * row[name] / blocks for name in (*POLICIES, "opt")}
        # The same in each round: nothing in it depends on time.
        same = {name: partial(float, percent[name]) for name in percent}
        for policy in (*POLICIES, "opt"):
            yield Case(
                "eviction",
                f"{policy}, room for {row['percent']:g}% of the trace's blocks",
                "% hits",
                same[policy],
                limit=None if policy == "opt" else same["opt"],
            )


def parser_of(module: str, description: str | None, sizes: Sequence[float]) -> ArgumentParser:
    """What benches that replay a trace at some sizes take."""
    parser = ArgumentParser(prog=f"python -m bench.{module}", description=description)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("trace", nargs="?", type=Path, default=TRACE)
    parser.add_argument("--requests", type=int, help="how many of the trace; default: all")
    parser.add_argument("--sizes", type=float, nargs="+", default=sizes, help="percent")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    return parser


def replayed(
    options: Namespace,
    measure: Callable[[Sequence[Prompt]], Iterator[dict[str, Any]]],
    said: str,
    columns: str,
    line: Callable[[dict[str, Any], int], str],
) -> int:
    """Print a row of each size, and write all where `options` say; the status. `said`: what a row
    shows, `columns`: their names, `line`: a row's columns, given how many blocks were asked for."""
    if not options.trace.exists():
        print(f"there is no trace at {options.trace}; name one", file=sys.stderr)
        return 2
    prompts = prompts_of(options.trace, options.requests)
    blocks = sum(map(len, prompts))
    print(f"{len(prompts)} prompts of {blocks} blocks; {said}")
    print(f"{'size':>6} {'slots':>8}{columns}")
    rows = []
    for row in measure(prompts):
        rows.append(row)
        print(f"{row['percent']:>5g}% {row['slots']:>8}{line(row, blocks)}", flush=True)
    if options.json is not None:
        whole = {"requests": len(prompts), "blocks": blocks, "rows": rows}
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = parser_of("eviction", __doc__, SIZES)
    parser.add_argument("--step", type=int, help="blocks stored at a time; default: a prompt's")
    options = parser.parse_args(arguments)
    names = (*POLICIES, "opt")

    def line(row: dict[str, Any], blocks: int) -> str:
        return "".join(f"{row[n]:>9}{row[n] / max(1, row['opt']):>7.1%}" for n in names)

    rows = partial(measure, sizes=options.sizes, step=options.step)
    columns = "".join(f"{name:>16}" for name in names)
    return replayed(options, rows, "hits, of opt's in percent", columns, line)


if __name__ == "__main__":
    sys.exit(main())
