"""A report as text: what hurts first, then what it brings."""

from __future__ import annotations

from spec.fields import format_size
from tiers.tuning.report import GhostUse, Report, TierUse

_COLUMNS = ("tier", "loads", "stores", "written", "SSD life", "dropped", "hit tokens", "of all")


def table(report: Report) -> str:
    """A row for each tier, then the lines for all of them, then the warnings."""
    rows = [_COLUMNS, *(_row(tier, report.prompt_tokens) for tier in report.tiers)]
    rows += [_ghost(ghost) for ghost in report.ghosts]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    if not report.tiers:
        lines = []
    return "\n".join([*lines, *_sums(report), *(f"warning: {text}" for text in report.warnings)])


def _row(tier: TierUse, prompt_tokens: int) -> tuple[str, ...]:
    return (
        tier.name,
        f"{tier.load_busy:.0%} busy",
        f"{tier.store_busy:.0%} busy",
        f"{format_size(int(tier.written_bytes_per_day))}/day",
        _life(tier.life_years),
        f"{tier.dropped_share:.1%}",
        f"{tier.hit_tokens:,}",
        _share(tier.hit_tokens, prompt_tokens),
    )


def _ghost(ghost: GhostUse) -> tuple[str, ...]:
    stored, hits = f"{ghost.store_ratio:.1%}", f"{ghost.hit_ratio:.1%} ± {ghost.error:.1%}"
    return f"ghost {ghost.name}", "-", stored, "-", "-", "-", "-", hits


def _sums(report: Report) -> list[str]:
    own = _share(report.engine_hit_tokens, report.prompt_tokens)
    computed = _share(report.computed_tokens, report.prompt_tokens)
    lines = [
        f"GPUs are busy for {report.gpu_load:.0%} of the time",
        f"{report.requests:,} requests of {report.prompt_tokens:,} prompt tokens: {own} from the "
        f"engine's own cache, {_share(report.tier_hit_tokens, report.prompt_tokens)} from tiers, "
        f"{computed} computed",
        f"time to first token: mean {_seconds(report.ttft_mean)}, median "
        f"{_seconds(report.ttft_p50)}, 99th percentile {_seconds(report.ttft_p99)}",
        f"prefill saved: {report.prefill_seconds_saved:,.0f} GPU seconds in "
        f"{report.seconds:,.0f} s",
    ]
    if report.ghosts:
        lines.append(
            "ghosts: how many of all prompts' full blocks this tier alone would store and would "
            "have, also those that the engine's own cache has"
        )
    cost = report.cost_per_million_saved_tokens
    if cost is not None:
        lines.append(f"price of a million tokens from tiers: {cost:.4g}")
    return lines


def _life(years: float | None) -> str:
    if years is None:
        return "-"
    return f"{years:.1f} years" if years >= 1 else f"{years * 365.25:.3g} days"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
