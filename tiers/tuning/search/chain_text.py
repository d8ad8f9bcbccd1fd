"""A chain and its figures in words, and as an operator's YAML with the reason of each choice."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

import yaml

from spec.fields import exact_size, format_duration, format_rate
from spec.text import decimal_size, seconds
from tiers.tuning.report import Report, TierUse
from tiers.tuning.search.budget import CHOSEN, Budget, Objective
from tiers.tuning.search.search import Evaluated, Gap
from tiers.tuning.simulation.sim_chain import SimChain, SimTier

WIDTH = 100
_RATES = {"load_rate", "store_rate", "write_budget"}
_SIZES = {"max_inflight", "staging"}


# -- words ---------------------------------------------------------------------------------------


def percent(share: float) -> str:
    """A share like 3.2%; two digits, or all that are before the point."""
    part = share * 100
    return f"{part:.0f}%" if part >= 10 else f"{part:.1f}%" if part >= 0.1 else f"{part:.2g}%"


def change(gap: Gap, objective: Objective) -> str:
    """How the objective changes, like "-4.0% ± 8.1%": less is better, but for `saved_seconds`."""
    if gap.share == 0 and gap.margin < 0.01:
        return "the same"
    share = -gap.share if objective == "saved_seconds" else gap.share
    margin = "±?" if math.inf in (gap.margin, abs(share)) else f"± {_digits(gap.margin)}%"
    digits = _digits(abs(share))
    return f"{'-' if share < 0 and float(digits) else '+'}{digits}% {margin}"


def _digits(share: float) -> str:
    return f"{share * 100:.0f}" if share >= 0.0995 else f"{share * 100:.1f}"


def finite(value: float | None) -> float | None:
    """For JSON, which has no infinity."""
    return value if value is not None and math.isfinite(value) else None


def name(chain: SimChain) -> str:
    """A chain in a few words, which no other chain has."""
    tiers = ", ".join(" ".join(_tier_words(tier)) for tier in chain.tiers)
    words = [tiers or "no tiers", *([chain.load_policy] if tiers else ())]
    for key, value in _set(chain, "tiers", "load_policy" if tiers else ""):
        words.append("no promotion" if key == "promote" else f"{key} {_written(key, value)}")
    return "; ".join(words)


def _tier_words(tier: SimTier) -> Iterator[str]:
    yield tier.type if tier.name == tier.type else f"{tier.name} ({tier.type})"
    if tier.capacity is not None:
        yield exact_size(tier.capacity)
    short = {"eviction": tier.eviction, "store_threshold": f"from use {tier.store_threshold}"}
    for key, value in _set(tier, "name", "type", "is_host", "capacity"):
        yield short.get(key) or f"{key} {_written(key, value)}"


def _set(one: SimChain | SimTier, *named: str) -> Iterator[tuple[str, object]]:
    """The settings that are not the default, but those that are `named` otherwise."""
    for field in fields(one):
        value = getattr(one, field.name)
        if field.name not in named and value != field.default:
            yield field.name, value


def _written(key: str, value: object) -> str:
    if key in _RATES and isinstance(value, int | float):
        return format_rate(value)
    if key in ("ttl", "max_wait") and isinstance(value, float):
        return format_duration(value)
    return exact_size(value) if key in _SIZES and isinstance(value, int) else str(value).lower()


def expected(report: Report) -> Sequence[str]:
    """A report in paragraphs: waiting times, GPUs, tiers' writes, and warnings."""
    share = report.tier_hit_tokens / max(1, report.prompt_tokens)
    found = [
        f"TTFT: mean {seconds(report.ttft_mean)}, p50 {seconds(report.ttft_p50)}, p99 "
        f"{seconds(report.ttft_p99)}. {percent(share)} of the prompts' tokens come from tiers. "
        f"GPUs are busy with prompts {percent(report.gpu_load)} of the time."
    ]
    for tier in report.tiers:
        text = f"{tier.name} is written {decimal_size(tier.written_bytes_per_day)} a day"
        if tier.life_years is not None:
            text += f" and lasts {tier.life_years:.2g} years"
        if tier.dropped_blocks:
            text += f"; {percent(tier.dropped_share)} of its stores are dropped"
        found.append(f"{text}.")
    if report.price_per_month is not None:
        found.append(f"The tiers cost {report.price_per_month:,.0f} a month.")
    return [*found, *(f"Beware: {warning}." for warning in report.warnings)]


# -- YAML ----------------------------------------------------------------------------------------

Reasons = Mapping[tuple[str, str | None], Sequence[str]]
"""The results of the choices that were not taken, by the setting and its tier."""


def chain_yaml(chosen: Evaluated, budget: Budget, why: Reasons, head: Sequence[str]) -> str:
    """The YAML of a chain that has tiers, with comments. `head`: paragraphs for its top."""
    chain, report = chosen.chain, chosen.report
    lines = [line for text in head for line in _comment(text)]
    lines.append("version: 1")
    for key in CHOSEN:
        value = str(getattr(chain, key)).lower()
        lines += _line(f"{key}: {value}", why.get((key, None), ()), "")
    lines.append("tiers:")
    for tier, use in zip(chain.tiers, report.tiers, strict=True):
        lines += _tier(tier, use, report, budget, why)
    return "\n".join(lines) + "\n"


def _tier(tier: SimTier, use: TierUse, report: Report, budget: Budget, why: Reasons) -> list[str]:
    medium = budget.medium(tier.type)
    share = use.hit_tokens / max(1, report.prompt_tokens)
    others = [*why.get(("tiers", tier.type), ()), *why.get(("order", tier.type), ())]
    lines = _comment(
        f"{tier.type} serves {percent(share)} of the prompts' tokens; its link is busy with loads "
        f"{percent(use.load_busy)} of the time, with stores {percent(use.store_busy)}."
        + _sentences(others),
        "  ",
    )
    capacity, sizes = tier.capacity or 0, why.get(("capacity", tier.type), ())
    settings = {"store_threshold": str(tier.store_threshold)}
    if len(medium.evictions) > 1:
        settings = {"eviction": tier.eviction, **settings}
    if tier.write_budget is not None:
        settings["write_budget"] = format_rate(tier.write_budget)
    if medium.size_key is None:
        lines += _comment(
            f"Give it {decimal_size(capacity)} at the server." + _sentences(sizes), "  "
        )
    lines.append(f"  - type: {tier.type}")
    indent = "    "
    for key, value in medium.settings.items():
        inline = yaml.safe_dump([value], default_flow_style=True, width=1 << 20).strip()[1:-1]
        lines.append(f"{indent}{key}: {inline}")
    if medium.size_key is not None:
        lines += _line(f"{indent}{medium.size_key}: {exact_size(capacity)}", sizes, indent)
    for key, text in settings.items():
        lines += _line(f"{indent}{key}: {text}", why.get((key, tier.type), ()), indent)
    return lines


def _sentences(texts: Sequence[str]) -> str:
    return "".join(f" {text[:1].upper()}{text[1:]}." for text in texts)


def _line(line: str, why: Sequence[str], indent: str) -> list[str]:
    """A line of YAML, behind it the results of the other choices, or above it if they are long."""
    reasons = ", ".join(why)
    if not reasons:
        return [line]
    if len(line) + len(reasons) + 4 <= WIDTH:
        return [f"{line}  # {reasons}"]
    return [*_comment(reasons, indent), line]


def _comment(text: str, indent: str = "") -> list[str]:
    start = f"{indent}# "
    return textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=start)
