"""Why was a request served as it was? Notes of it become an account of its tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spec.errors import one_line
from tiers.explain.notes import Attempt, LoadPart, RequestNotes, TierAnswer

REASONS = {
    "served": "it loaded the blocks",
    "miss": "it does not have the block",
    "down": "it is down",
    "not_open": "it is not open, or can't be used",
    "failed": "its last lookup or read failed",
    "failed_before": "it failed to load this request before",
    "late": "its lookup took too long",
    "tenant": "a rule of the tenant keeps the request's blocks out of it",
    "limit": "the request's own limits",
    "budget": "the request had waited for max_wait",
    "computing": "computing is faster",
    "short": "it has too little to be of use",
    "above": "another tier serves these blocks",
    "elsewhere": "another connector of the engine serves, or the engine took nothing",
    "nothing": "there was no whole block to load",
    "not_asked": "it was not asked, since others have all",
    "lost": "it had lost the block after the lookup",
    "load_failed": "the load of the block failed, or was late",
    "earlier": "another tier's load failed at an earlier block",
    "loading": "the load is in flight",
}
"""Why a tier served or did not, and what the words mean."""
PARTS = ("queue", "load", "check", "copy")
Told = Mapping[str, Any]


class Accounts:
    """Makes accounts of requests over the tiers of these names."""

    def __init__(self, names: Sequence[str], block_tokens: int) -> None:
        self._names = names
        self._block_tokens = block_tokens

    def of(self, notes: RequestNotes) -> dict[str, Any]:
        """What came of a request, as JSON takes it."""
        attempts = [self._attempt(one, None) for one in list(notes.attempts)]
        pending = notes.pending
        if pending is not None:
            attempts.append(self._attempt(pending, time.perf_counter()))
        hits = {self._names[child]: tokens for child, tokens in list(notes.hits.items())}
        return {
            "request": notes.request_id,
            "state": _state(notes),
            "began": notes.began,
            "prompt_tokens": notes.prompt,
            "attempts": attempts,
            "attempts_left_out": notes.left_out,
            "external_hits": {"engine": notes.external, "tiers": hits},
            "holds": sum(hits.values()) == notes.external
            and all(one["holds"] is not False for one in attempts),
        }

    def _attempt(self, one: Attempt, now: float | None) -> dict[str, Any]:
        sources = self._sources(one)
        return {
            "preempted": one.preempted,
            "asked": one.asks,
            **sources,
            "tiers": [self._tier(child, one) for child in range(len(self._names))],
            "milliseconds": _times(one, now),
            **({"waited_for": one.waits_for} if one.waits_for else {}),
        }

    # -- tokens ------------------------------------------------------------------------------

    def _sources(self, one: Attempt) -> dict[str, Any]:
        """Where the tokens came from; `holds`: whether that is what the engine ran with.

        Only a request that has run shows what it had: before that `computed` is not known.
        """
        size = self._block_tokens
        foreign = one.choice.child if one.choice is not None and not one.parts else None
        tiers = {
            self._names[part.child]: None if part.usable is None else part.usable * size
            for part in sorted(one.parts, key=lambda part: part.child)
        }
        loaded = sum(tokens or 0 for tokens in tiers.values())
        cached, computed, again, elsewhere, holds = one.cached, None, 0, 0, None
        if one.started is not None:
            # The engine computes a prompt's last token again, whatever it has.
            again = int(one.started == one.tokens - 1 == cached + loaded - 1)
            more = one.started + again - cached - loaded
            if foreign is not None and one.external:
                tiers[self._names[foreign]] = more = max(0, more)
                loaded += more
            elif more > 0:
                elsewhere = more
            elif not one.external:
                cached += more  # it took less of its own cache than it had asked for
            computed = one.tokens - cached - loaded - elsewhere
            holds = cached + loaded + elsewhere == one.started + again
        return {
            "tokens": one.tokens,
            "own_cache": cached,
            "loaded": tiers,
            "elsewhere": elsewhere,
            "computed": computed,
            "computed_again": again,
            "holds": holds,
        }

    # -- tiers -------------------------------------------------------------------------------

    def _tier(self, child: int, one: Attempt) -> dict[str, Any]:
        told: dict[str, Any] = {"tier": self._names[child]}
        answer = next((a for a in one.answers if a.child == child), None)
        part = next((p for p in list(one.parts) if p.child == child), None)
        if answer is not None:
            told |= {"asked_blocks": answer.asked, "held_blocks": answer.held}
            told |= {"miss": answer.miss, "lookup_ms": _ms(answer.times.answer)}
            told["notice_ms"] = _ms(answer.times.notice)
        if child in one.foreign:
            told["said_tokens"] = one.foreign[child]
        if part is not None:
            told |= self._part(part, one)
        else:
            told["why"] = self._why(child, one, answer)
            told["tokens"] = 0
            if one.choice is not None and one.choice.child == child and one.external:
                told |= {"why": "served", "tokens": self._sources(one)["loaded"].get(told["tier"])}
        return told

    def _part(self, part: LoadPart, one: Attempt) -> dict[str, Any]:
        told: dict[str, Any] = {
            "why": "served" if part.usable == part.blocks else "loading",
            "tokens": None if part.usable is None else part.usable * self._block_tokens,
            "blocks": [[r.start, r.stop] for r in part.ranges],
        }
        if part.seconds is not None:
            told["wait_ms"] = _ms(part.seconds)
            told |= {f"{name}_ms": _ms(s) for name, s in part.times._asdict().items()}
        if part.failed is not None:
            told |= {"why": "lost" if part.lost else "load_failed", "failed": part.failed}
            told["lost"] = part.lost
        elif part.usable is not None and part.usable < part.blocks:
            told["why"] = "earlier"
        return told

    def _why(self, child: int, one: Attempt, answer: TierAnswer | None) -> str:
        """Why a child that loads nothing does not."""
        name = self._names[child]
        if one.spent:
            return "budget"
        if one.limits is not None and not one.limits.may_load(name):
            return "limit"
        if answer is not None and answer.why:
            return answer.why
        if answer is not None and not answer.held:
            return "miss"
        choice = one.choice
        if choice is None:
            return "loading"
        if child in choice.passed:
            return "computing"
        if choice.tokens and not one.external:
            return "elsewhere"
        if child in one.foreign:
            return "above" if one.foreign[child] else "miss"
        if answer is None:
            return "not_asked" if choice.tokens else "nothing"
        if choice.tokens:
            return "above"
        return "miss" if answer.miss == answer.first else "short"


def _state(notes: RequestNotes) -> str:
    if notes.ended is not None:
        return notes.ended or "ended"
    last = notes.attempts[-1] if notes.attempts else None
    if notes.pending is not None or last is None:
        return "waiting"
    return "loading" if last.started is None and last.external else "running"


def _times(one: Attempt, now: float | None) -> dict[str, float | None]:
    """What the request waited, by the scheduler's clock."""
    began = one.allocated if now is None else now
    looked = one.looked_for
    return {
        "lookup": _ms(looked.waited - looked.notice),
        "notice": _ms(looked.notice),
        "other_load": _ms(one.joined_for),
        "until_begun": None if began is None else _ms(began - one.asked),
        "load": None if one.external and one.loaded_at is None else _ms(one.loaded_for),
        "until_run": None if one.started_at is None else _ms(one.started_at - one.asked),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


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
