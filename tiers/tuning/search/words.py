"""Figures as people read them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields

from spec.fields import exact_size, format_rate
from tiers.tuning.report import Report
from tiers.tuning.search.budget import Objective
from tiers.tuning.search.score import Gap
from tiers.tuning.simulation.chain import SimChain, SimTier

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_RATES = {"load_rate", "store_rate", "write_budget"}
_SIZES = {"max_inflight", "staging"}


def percent(share: float) -> str:
    """A share like 3.2%; two digits, or all that are before the point."""
    part = share * 100
    return f"{part:.0f}%" if part >= 10 else f"{part:.1f}%" if part >= 0.1 else f"{part:.2g}%"


def change(gap: Gap, objective: Objective) -> str:
    """How the objective changes, like "-4.0% ± 8.1%": less is better, but for `saved_seconds`."""
    if gap.share == 0 and gap.margin < 0.01:
        return "the same"
    share = -gap.share if objective == "saved_seconds" else gap.share
    margin = "±?" if math.isinf(gap.margin) else f"± {_digits(gap.margin)}%"
    said = _digits(abs(share))
    return f"{'-' if share < 0 and float(said) else '+'}{said}% {margin}"


def _digits(share: float) -> str:
    return f"{share * 100:.0f}" if share >= 0.0995 else f"{share * 100:.1f}"


def seconds(value: float) -> str:
    """A time like 420 ms or 1.23 s."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"


def size(value: float) -> str:
    """Bytes like 4.2 TB; powers of 1000."""
    scale, unit = next(((s, u) for s, u in _UNITS if value >= s), (1.0, "B"))
    return f"{value / scale:.3g} {unit}"


def name(chain: SimChain) -> str:
    """A chain in a few words, in which no other chain is told."""
    tiers = ", ".join(" ".join(_tier(tier)) for tier in chain.tiers)
    return "; ".join([tiers or "no tiers", *_chain(chain)])


def _tier(tier: SimTier) -> Iterator[str]:
    yield tier.type if tier.name == tier.type else f"{tier.name} ({tier.type})"
    if tier.capacity is not None:
        yield exact_size(tier.capacity)
    short = {"eviction": tier.eviction, "store_threshold": f"from use {tier.store_threshold}"}
    for key, value in _set(tier, "name", "type", "is_host", "capacity"):
        yield short.get(key) or f"{key} {_written(key, value)}"


def _chain(chain: SimChain) -> Iterator[str]:
    if chain.tiers:
        yield chain.load_policy
    for key, value in _set(chain, "tiers", "load_policy" if chain.tiers else ""):
        yield "no promotion" if key == "promote" else f"{key} {_written(key, value)}"


def _set(one: SimChain | SimTier, *told: str) -> Iterator[tuple[str, object]]:
    """What is not as it is unless it is set, but for what is `told` otherwise."""
    for field in fields(one):
        value = getattr(one, field.name)
        if field.name not in told and value != field.default:
            yield field.name, value


def _written(key: str, value: object) -> str:
    if key in _RATES and isinstance(value, int | float):
        return format_rate(value)
    return exact_size(value) if key in _SIZES and isinstance(value, int) else str(value).lower()


def expected(report: Report) -> Sequence[str]:
    """What a report says, in paragraphs: waiting times, GPUs, tiers' writes, and warnings."""
    share = report.tier_hit_tokens / max(1, report.prompt_tokens)
    told = [
        f"TTFT: mean {seconds(report.ttft_mean)}, p50 {seconds(report.ttft_p50)}, p99 "
        f"{seconds(report.ttft_p99)}. {percent(share)} of the prompts' tokens come from tiers. "
        f"GPUs are busy with prompts {percent(report.gpu_load)} of the time."
    ]
    for tier in report.tiers:
        text = f"{tier.name} is written {size(tier.written_bytes_per_day)} a day"
        if tier.life_years is not None:
            text += f" and lasts {tier.life_years:.2g} years"
        if tier.dropped_blocks:
            text += f"; {percent(tier.dropped_share)} of its stores are dropped"
        told.append(f"{text}.")
    if report.price_per_month is not None:
        told.append(f"The tiers cost {report.price_per_month:,.0f} a month.")
    return [*told, *(f"Beware: {warning}." for warning in report.warnings)]
