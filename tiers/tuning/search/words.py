"""Figures as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from tiers.tuning.report import Report
from tiers.tuning.simulation.chain import SimChain

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def percent(share: float) -> str:
    """A share like 3.2%; two digits, or all that are before the point."""
    part = share * 100
    return f"{part:.0f}%" if part >= 10 else f"{part:.1f}%" if part >= 0.1 else f"{part:.2g}%"


def seconds(value: float) -> str:
    """A time like 420 ms or 1.23 s."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"


def size(value: float) -> str:
    """Bytes like 4.2 TB; powers of 1000."""
    scale, unit = next(((s, u) for s, u in _UNITS if value >= s), (1.0, "B"))
    return f"{value / scale:.3g} {unit}"


def name(chain: SimChain) -> str:
    """A chain in a few words."""
    tiers = ", ".join(
        f"{tier.type} {size(tier.capacity)}" if tier.capacity else tier.type for tier in chain.tiers
    )
    return f"{tiers}; {chain.load_policy}" if tiers else "no tiers"


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
