"""Curves as an operator reads them: table and JSON, in blocks, tokens and bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from spec.offloading import OffloadingSpec
from spec.text import aligned, format_size
from tiers.tuning.curve import Curves, HitCurve
from tiers.tuning.machine import size_key, size_of

_ROWS, _POINTS = 13, 200


class TierMark(NamedTuple):
    """A tier of a given chain, and its size."""

    name: str
    blocks: int
    from_second_use: bool
    """It stores a block from its second request on."""


@dataclass(frozen=True)
class Row:
    """The hits of a size; ratios are of all full blocks of prompts."""

    tier: str | None
    blocks: int
    tokens: int
    bytes: int | None
    hits: int
    hit_ratio: float
    token_ratio: float
    """Of all prompt tokens, partial last blocks included."""
    from_second_use: float | None
    first_half: float | None
    second_half: float | None


@dataclass(frozen=True)
class CurveReport:
    """Curves and what gives them units. `token_bytes`: KV bytes of a token, if known."""

    curves: Curves
    token_bytes: int | None
    marks: Sequence[TierMark] = ()

    def rows(self) -> list[Row]:
        """A row for round sizes up to the largest that brings something, and for each mark."""
        sizes = [(size, "") for size in self._round_sizes()]
        sizes += [(mark.blocks, mark.name) for mark in self.marks if mark.blocks]
        return [self._row(size, name or None) for size, name in sorted(sizes)]

    def table(self) -> str:
        """The rows as text; a chain's tiers are named."""
        head = ["size", "blocks", "tokens", "hits", "of tokens", "2nd use", "1st half", "2nd half"]
        rows = self.rows()
        lines = aligned([head, *([*self._cells(row)] for row in rows)], left=0)
        second = {mark.name for mark in self.marks if mark.from_second_use}
        marks = [
            f"  <- {row.tier}{' (2nd use)' if row.tier in second else ''}" if row.tier else ""
            for row in rows
        ]
        return "\n".join([lines[0], *map(str.__add__, lines[1:], marks)])

    def to_json(self) -> dict[str, Any]:
        curves = self.curves
        step = math.log(self._most) / (_POINTS - 1)  # sizes from 1 to the largest, in equal ratios
        sizes = sorted({round(math.exp(step * n)) for n in range(_POINTS)} | {self._most})
        return {
            "block_tokens": curves.block_tokens,
            "kv_bytes_per_token": self.token_bytes,
            "requests": curves.all.requests,
            "tokens": curves.all.tokens,
            "blocks": curves.all.references,
            "distinct_blocks": curves.distinct,
            "useful_blocks": curves.all.useful,
            "tiers": [asdict(self._row(mark.blocks, mark.name)) for mark in self.marks],
            "sizes": [asdict(self._row(size, None)) for size in sizes],
        }

    def _row(self, blocks: int, tier: str | None) -> Row:
        curves = self.curves
        first, second = curves.halves or (None, None)
        hits = curves.all.hits(blocks)
        tokens, tokens_held = hits * curves.block_tokens, blocks * curves.block_tokens

        def ratio(curve: HitCurve | None) -> float | None:
            return None if curve is None else round(curve.ratio(blocks), 6)

        return Row(
            tier,
            blocks,
            tokens_held,
            None if self.token_bytes is None else tokens_held * self.token_bytes,
            hits,
            round(curves.all.ratio(blocks), 6),
            round(tokens / curves.all.tokens, 6) if curves.all.tokens else 0.0,
            ratio(curves.second_use),
            ratio(first),
            ratio(second),
        )

    def _cells(self, row: Row) -> Iterator[str]:
        yield "-" if row.bytes is None else format_size(row.bytes)
        yield f"{row.blocks:,}"
        yield f"{row.tokens:,}"
        yield f"{row.hit_ratio:.2%}"
        yield f"{row.token_ratio:.2%}"
        for ratio in (row.from_second_use, row.first_half, row.second_half):
            yield "-" if ratio is None else f"{ratio:.2%}"

    @property
    def _most(self) -> int:
        """The largest size to show."""
        return max(1, self.curves.all.useful)

    def _round_sizes(self) -> Iterator[int]:
        """Powers of two of gigabytes, or of blocks, up to the largest; then that itself."""
        unit = 1.0
        if self.token_bytes is not None:
            unit = 2**30 / (self.curves.block_tokens * self.token_bytes)
        highest = math.floor(math.log2(self._most / unit))
        sizes = {round(unit * 2.0**step) for step in range(highest - _ROWS + 2, highest + 1)}
        yield from sorted(size for size in sizes if 1 <= size < self._most)
        yield self._most


def marks_of(tiers: Sequence[OffloadingSpec], block_bytes: int) -> tuple[list[TierMark], list[str]]:
    """The tiers of a chain by size in blocks, and for each that can't be shown why."""
    marks, without = [], []
    for tier in tiers:
        name, capacity = tier.tier_name, size_of(tier)
        if capacity is None:
            key = size_key(type(tier)) or "capacity"
            without.append(f"{name} is not marked: its YAML has no {key}")
        elif capacity < block_bytes:
            without.append(f"{name} is not marked: a block of {block_bytes} bytes does not fit")
        else:
            marks.append(TierMark(name, capacity // block_bytes, tier.store_threshold >= 2))
    return marks, without
