"""The load policy `soonest`: tiers share a prefix so that the last of its blocks comes soonest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from tiers.connector.contract.coverage import (
    COMPLETE,
    MISSING,
    NO_WINDOW,
    leading,
    usable,
    waves,
)
from tiers.connector.policy.cheapest.linear_fit import LinearFit
from tiers.connector.policy.cheapest.load_cost import LoadCost
from tiers.connector.policy.cheapest.probing import Exploration
from tiers.connector.policy.choice import Choice, Coverage, Shares, Stitch
from tiers.shares import Pace, Stretch, share

MOST_DOUBT = 10
"""Failed loads in a row beyond which a tier is not doubted more: it then counts as a thousand
times slower than measured."""
PROBE_TOKENS = 64
"""Of the shortest probe of a tier that others are sooner than."""
LEAST_SECONDS = 1e-9
"""For a block, where a fit says that it costs nothing."""


class Plan(NamedTuple):
    """Who loads what of a prefix. `seconds`: until the last block. `probed`: as in `Choice`."""

    found: Stitch
    seconds: float
    probed: int | None


class Soonest:
    """Shares prefixes out among the children whose loads are measured; `meters` has them by child.

    A child that was never measured is taken to be as fast as the fastest that was. One that fails
    loads counts as twice as slow with each failure in a row, until it serves a load whole, and its
    part of a prefix is the last, so that a failure costs little. One that gets nothing is probed
    now and then with a few blocks (see `Exploration`).
    """

    def __init__(
        self, block_tokens: int, meters: Mapping[int, LoadCost], now: Callable[[], float]
    ) -> None:
        self._size = block_tokens
        self._meters = meters
        self._unknown = LoadCost(now)
        self._probes = Exploration(least=-(-PROBE_TOKENS // block_tokens))

    def plan(self, children: Mapping[int, Coverage], blocks: range, window: int = 0) -> Plan:
        """Share a prefix of `blocks` out. The prefix ends where `stitched` would end it; the last
        `window` blocks come from children that hold them whole."""
        if not children:
            return Plan(Stitch({}, blocks.start, False), 0.0, None)
        levels, looking = _ask(children, blocks)
        best = [max(held) for held in zip(*levels.values(), strict=True)]
        count = usable(best, window) if window else leading(best)
        tail = max(0, count - window)
        stretches = _stretches(levels, range(tail), NO_WINDOW)
        stretches += _stretches(levels, range(tail, count), COMPLETE if window else NO_WINDOW)
        paces = {child: self._pace(child) for child in levels}
        shares, seconds = share(stretches, paces, self._failures)
        used = {child for child, _ in shares}
        probed = None
        for child in self._meters.keys() - used if not window else ():
            forced = _forced(stretches, child, self._probes.length(child))
            if forced and self._is_due(child, paces[child], forced[1], seconds):
                shares, probed = share(forced[0], paces, self._failures)[0], child
                break
        ends = looking and count < len(blocks)
        found = Stitch(_placed(shares, blocks.start), blocks.start + count, ends)
        return Plan(found, seconds, probed)

    def decided(self, choice: Choice) -> None:
        """The engine begins a request as it was chosen."""
        for child in self._meters:
            if child == choice.probed:
                self._probes.made(child)
            elif child in (choice.shares or {}):
                self._probes.measured(child)
            else:
                self._probes.earn(child, choice.seconds)

    def _failures(self, child: int) -> int:
        return self._meters.get(child, self._unknown).failures

    def _pace(self, child: int) -> Pace:
        meter = self._meters.get(child, self._unknown)
        line = meter.line or self._fastest()
        doubt = 1 << min(meter.failures, MOST_DOUBT)
        each = max(line.each * self._size, LEAST_SECONDS)
        return Pace(meter.wait(line) + line.fixed * doubt, each * doubt)

    def _fastest(self) -> LinearFit:
        """The line of a child that was never measured."""
        lines = [meter.line for meter in self._meters.values() if meter.line is not None]
        return min(lines, key=lambda line: line.each, default=LinearFit(0.0, 0.0))

    def _is_due(self, child: int, pace: Pace, blocks: int, seconds: float) -> bool:
        """Whether to probe a child with so many blocks of a prefix that takes `seconds` without."""
        cost = pace.ready + pace.each * blocks
        idle = not self._meters[child].is_loading
        return idle and self._probes.is_due(child, max(cost - seconds, cost / 10))


def _ask(children: Mapping[int, Coverage], blocks: range) -> tuple[dict[int, list[int]], bool]:
    """What each child holds, up to the wave in which a gap that all leave ends the prefix; and
    whether any is still looking, which holds nothing so far."""
    levels: dict[int, list[int]] = {child: [] for child in children}
    looking = False
    for wave in waves(blocks):
        best: Sequence[int] = [MISSING] * len(wave)
        for child, coverage in children.items():
            held = coverage(wave)
            if held is None:
                looking, held = True, [MISSING] * len(wave)
            levels[child] += held
            best = list(map(max, best, held))
        if not all(best):
            break
    return levels, looking


def _stretches(levels: Mapping[int, Sequence[int]], blocks: range, least: int) -> list[Stretch]:
    """Who holds at least `least` of these blocks."""
    parts = {child: level[blocks.start : blocks.stop] for child, level in levels.items()}
    if all(len(set(part)) <= 1 for part in parts.values()):  # by far most often
        holders = tuple(child for child, part in parts.items() if part and part[0] >= least)
        return [(holders, len(blocks))] if blocks else []
    each = zip(*parts.values(), strict=True)
    stretches = []
    for level, run in groupby(each):
        holders = tuple(child for child, much in zip(parts, level, strict=True) if much >= least)
        stretches.append((holders, len(list(run))))
    return stretches


def _forced(
    stretches: Sequence[Stretch], child: int, most: int
) -> tuple[list[Stretch], int] | None:
    """The stretches with `most` blocks at most, and how many, for a child alone: the last of the
    last stretch that it holds. None: it holds nothing."""
    mine = [at for at, (holders, _) in enumerate(stretches) if child in holders]
    if not mine:
        return None
    forced = list(stretches)
    holders, length = forced[mine[-1]]
    count = min(most, length)
    forced[mine[-1] : mine[-1] + 1] = [(holders, length - count), ((child,), count)]
    return [(holders, length) for holders, length in forced if length], count


def _placed(pieces: Sequence[tuple[int, int]], block: int) -> Shares:
    shares: Shares = {}
    for child, run in groupby(pieces, key=lambda piece: piece[0]):
        stop = block + sum(count for _, count in run)
        shares.setdefault(child, []).append(range(block, stop))
        block = stop
    return shares
