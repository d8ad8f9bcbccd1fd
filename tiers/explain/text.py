"""An account of a request for people: a few lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spec.errors import one_line
from tiers.explain.accounts import REASONS

PARTS = ("queue", "load", "check", "copy")

Told = Mapping[str, Any]


def lines(told: Told) -> Iterator[str]:
    """The lines that tell of one request."""
    name = one_line(str(told["request"]))
    yield f"request {name}: {told['state']}, {told['prompt_tokens']} prompt tokens"
    attempts = told["attempts"]
    for number, attempt in enumerate(attempts, 1):
        if len(attempts) > 1:
            again = ", after a preemption" if attempt["preempted"] else ""
            yield f"  attempt {number} of {len(attempts) + told['attempts_left_out']}{again}"
        yield from _attempt(attempt)
    if not told["holds"]:
        yield "  THE COUNTS DO NOT AGREE with what the engine ran; please report this as a bug"


def _attempt(one: Told) -> Iterator[str]:
    yield f"  {_sources(one)}"
    for tier in one["tiers"]:
        yield f"    {one_line(str(tier['tier']))}: {_tier(tier)}"
    times = {name.replace("_", " "): ms for name, ms in one["milliseconds"].items() if ms}
    if times:
        yield "    ms: " + ", ".join(f"{name} {ms:g}" for name, ms in times.items())
    if "waited_for" in one:
        yield f"    waited for the load of request {one_line(str(one['waited_for']))}"


def _sources(one: Told) -> str:
    parts = [(one["own_cache"], "own cache")]
    parts += [(tokens, one_line(str(name))) for name, tokens in one["loaded"].items()]
    if one["elsewhere"]:
        parts.append((one["elsewhere"], "elsewhere (another connector, or part of a block)"))
    parts.append((one["computed"], "computed"))
    said = " + ".join(f"{'not known' if n is None else n} {name}" for n, name in parts)
    again = " (and the last one again)" if one["computed_again"] else ""
    return f"{one['tokens']} tokens = {said}{again}"


def _tier(tier: Told) -> str:
    why = REASONS[tier["why"]]
    if tier["why"] == "miss" and tier.get("miss") is not None:
        why = f"it does not have block {tier['miss']}"
    elif tier.get("failed") is not None:
        why = f"{why}: block {tier['failed']}"
    said = f"{'?' if tier['tokens'] is None else tier['tokens']} tokens, {why}"
    if "asked_blocks" in tier:
        said += f"; held {tier['held_blocks']} of {tier['asked_blocks']} blocks asked for"
        if tier["why"] != "miss" and tier["miss"] is not None:
            said += f", not block {tier['miss']}"
        if tier["notice_ms"]:
            took, notice = tier["lookup_ms"], tier["notice_ms"]
            said += f"; answered in {took:g} ms, which the engine took {notice:g} ms later"
    if "wait_ms" in tier:
        parts = ", ".join(f"{name} {tier[f'{name}_ms']:g}" for name in PARTS)
        said += f"; {tier['wait_ms']:g} ms ({parts})"
    return said
