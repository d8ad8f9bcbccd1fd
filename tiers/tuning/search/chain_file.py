"""The chosen chain as an operator's YAML, with the reason of each choice beside it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from spec.fields import exact_size, format_rate
from tiers.tuning.report import Report, TierUse
from tiers.tuning.search.budget import Budget
from tiers.tuning.search.search import Evaluated
from tiers.tuning.search.words import percent, size
from tiers.tuning.simulation.chain import SimTier

WIDTH = 100
Reasons = Mapping[tuple[str, str | None], Sequence[str]]
"""By what is chosen, and for which tier: what the other choices come to."""


def chain_yaml(chosen: Evaluated, budget: Budget, why: Reasons, head: Sequence[str]) -> str:
    """The YAML of a chain that has tiers, with comments. `head`: paragraphs for its top."""
    chain, report = chosen.chain, chosen.report
    lines = [line for text in head for line in _comment(text)]
    lines += ["version: 1"]
    lines += _choice("load_policy", chain.load_policy, why, None, "")
    lines += _choice("load_when", chain.load_when, why, None, "")
    lines += _choice("promote", str(chain.promote).lower(), why, None, "")
    lines.append("tiers:")
    for tier, use in zip(chain.tiers, report.tiers, strict=True):
        lines += _tier(tier, use, report, budget, why)
    return "\n".join(lines) + "\n"


def _tier(tier: SimTier, use: TierUse, report: Report, budget: Budget, why: Reasons) -> list[str]:
    medium = budget.medium(tier.type)
    share = use.hit_tokens / max(1, report.prompt_tokens)
    text = (
        f"{tier.type} serves {percent(share)} of the prompts' tokens; its link is busy with loads "
        f"{percent(use.load_busy)} of the time, with stores {percent(use.store_busy)}."
    )
    others = [*why.get(("tiers", tier.type), ()), *why.get(("order", tier.type), ())]
    text += _sentences(others)
    lines = _comment(text, "  ")
    capacity = tier.capacity or 0
    if medium.size_key is None:
        said = f"Give it {size(capacity)} at the server."
        said += "".join(
            f" {one[:1].upper()}{one[1:]}." for one in why.get(("capacity", tier.type), ())
        )
        lines += _comment(said, "  ")
    lines.append(f"  - type: {tier.type}")
    indent = "    "
    lines += [f"{indent}{key}: {_inline(value)}" for key, value in medium.settings.items()]
    if medium.size_key is not None:
        line = f"{indent}{medium.size_key}: {exact_size(capacity)}"
        lines += _line(line, why.get(("capacity", tier.type), ()), indent)
    if len(medium.evictions) > 1:
        lines += _choice("eviction", tier.eviction, why, tier.type, indent)
    lines += _choice("store_threshold", str(tier.store_threshold), why, tier.type, indent)
    if tier.write_budget is not None:
        rate = format_rate(tier.write_budget)
        lines += _choice("write_budget", rate, why, tier.type, indent)
    return lines


def _sentences(said: Sequence[str]) -> str:
    return "".join(f" {one[:1].upper()}{one[1:]}." for one in said)


def _choice(key: str, value: str, why: Reasons, tier: str | None, indent: str) -> list[str]:
    """A line of YAML, behind it what the other choices come to, or above it if that is long."""
    return _line(f"{indent}{key}: {value}", why.get((key, tier), ()), indent)


def _line(line: str, why: Sequence[str], indent: str) -> list[str]:
    said = ", ".join(why)
    if not said:
        return [line]
    if len(line) + len(said) + 4 <= WIDTH:
        return [f"{line}  # {said}"]
    return [*_comment(said, indent), line]


def _comment(text: str, indent: str = "") -> list[str]:
    start = f"{indent}# "
    return textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=start)


def _inline(value: Any) -> str:
    """A value as YAML on one line."""
    return str(yaml.safe_dump([value], default_flow_style=True, width=1 << 20)).strip()[1:-1]
