"""Why was a request served as it was? Notes of it become an account of its tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spec.errors import one_line
from tiers.explain.notes import MAX_ATTEMPTS, Attempt, LoadPart, RequestNotes, TierAnswer

REASONS = {
    "served": "it loaded the blocks",
    "miss": "it does not have the block",
    "down": "it is down",
    "not_open": "it is not open, or can't be used",
    "failed": "its last lookup or read failed",
    "failed_before": "it failed to load this request before",
    "late": "the request did not wait for its lookup any longer",
    "tenant": "a rule of the tenant keeps the request's blocks out of it",
    "limit": "the request's own limits, or prompt logprobs, which need each token computed",
    "out": "its reads are paused, or it was not in the chain",
    "budget": "the request had waited for max_wait",
    "room": "the engine had no room to load the request, or to load it again",
    "computing": "computing is faster",
    "engine": "computing is faster than what the engine takes beside a load",
    "max_wait": "its load would take longer than the request may wait (max_wait)",
    "short": "it has too little, or too little of what windows reach, to be of use",
    "above": "another tier serves these blocks",
    "elsewhere": "another connector of the engine serves, or the engine took nothing",
    "nothing": "there was no whole block to load",
    "not_asked": "it was not asked, since others have all",
    "lost": "it had lost the block after the lookup",
    "load_failed": "the load of the block failed, or was late",
    "earlier": "another tier's load failed at an earlier block",
    "loading": "the load is in flight",
    "looking": "its lookup is in flight",
    "waiting": "the request has yet to begin",
}
"""Why a tier served or did not, and what the words mean."""
PARTS = ("queue", "load", "check", "copy")
Account = Mapping[str, Any]


class Accounts:
    """Makes accounts of requests over the tiers of these names."""

    def __init__(self, names: Sequence[str], block_tokens: int) -> None:
        self._names = names
        self.block_tokens = block_tokens

    def of(self, notes: RequestNotes) -> dict[str, Any]:
        """What came of a request, as JSON takes it."""
        attempts = [self._attempt(attempt, None) for attempt in list(notes.attempts)]
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
            and all(attempt["holds"] is not False for attempt in attempts),
        }

    def _attempt(self, attempt: Attempt, now: float | None) -> dict[str, Any]:
        sources = self._sources(attempt)
        return {
            "preempted": attempt.preempted,
            "asked": attempt.asks,
            **sources,
            "tiers": [self._tier(child, attempt) for child in range(len(self._names))],
            "milliseconds": _times(attempt, now),
            **({"waited_for": attempt.waits_for} if attempt.waits_for else {}),
        }

    # -- tokens ------------------------------------------------------------------------------

    def _sources(self, attempt: Attempt) -> dict[str, Any]:
        """Where the tokens came from; `holds`: whether that is what the engine ran with.

        Only a request that has run shows what it had: before that `computed` is not known.
        """
        size = self.block_tokens
        tiers = {
            self._names[part.child]: None if part.usable is None else part.usable * size
            for part in sorted(attempt.parts, key=lambda part: part.child)
        }
        loaded = sum(tokens or 0 for tokens in tiers.values())
        cached, computed, again, elsewhere, holds = attempt.cached, None, 0, 0, None
        if attempt.started is not None:
            # The engine computes a prompt's last token again, whatever it has.
            again = int(attempt.started == attempt.tokens - 1 == cached + loaded - 1)
            more = attempt.started + again - cached - loaded
            if more > 0:
                elsewhere = more
            elif not attempt.external:
                cached += more  # it took less of its own cache than it had asked for
            computed = attempt.tokens - cached - loaded - elsewhere
            holds = cached + loaded + elsewhere == attempt.started + again
        return {
            "tokens": attempt.tokens,
            "own_cache": cached,
            "loaded": tiers,
            "elsewhere": elsewhere,
            "computed": computed,
            "computed_again": again,
            "holds": holds,
        }

    # -- tiers -------------------------------------------------------------------------------

    def _tier(self, child: int, attempt: Attempt) -> dict[str, Any]:
        account: dict[str, Any] = {"tier": self._names[child]}
        answer = next((a for a in attempt.answers if a.child == child), None)
        part = next((p for p in list(attempt.parts) if p.child == child), None)
        if answer is not None:
            account |= {"asked_blocks": answer.asked, "held_blocks": answer.held}
            account |= {"miss": answer.miss, "lookup_ms": _ms(answer.times.answer)}
            account["notice_ms"] = _ms(answer.times.notice)
        if part is not None:
            account |= self._part(part)
        else:
            account["why"] = self._why(child, attempt, answer)
            account["tokens"] = 0
        return account

    def _part(self, part: LoadPart) -> dict[str, Any]:
        account: dict[str, Any] = {
            "why": "served" if part.usable == part.blocks else "loading",
            "tokens": None if part.usable is None else part.usable * self.block_tokens,
            "blocks": [[r.start, r.stop] for r in part.ranges],
        }
        if part.seconds is not None:
            account["wait_ms"] = _ms(part.seconds)
            account |= {f"{name}_ms": _ms(s) for name, s in part.times._asdict().items()}
        if part.failed is not None:
            account |= {"why": "lost" if part.lost else "load_failed", "failed": part.failed}
            account["lost"] = part.lost
        elif part.usable is not None and part.usable < part.blocks:
            account["why"] = "earlier"
        return account

    def _why(self, child: int, attempt: Attempt, answer: TierAnswer | None) -> str:
        """Why a child loads nothing: a word of `REASONS`."""
        if self._names[child] in attempt.limited:
            return "limit"
        if attempt.order is not None and child not in attempt.order:
            return "out"
        if answer is not None and answer.why:
            return answer.why
        if answer is not None and not answer.held:
            return "miss"
        choice = attempt.choice
        if choice is None:
            return "looking" if child in attempt.unanswered else "waiting"
        if child in choice.passed:
            return choice.passed[child]
        if choice.tokens and not attempt.external:
            return "elsewhere"
        if answer is None and child in attempt.unanswered:
            return "late"
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


def _times(attempt: Attempt, now: float | None) -> dict[str, float | None]:
    """What the request waited, by the scheduler's clock."""
    began, ran = attempt.allocated if now is None else now, attempt.started_at
    looked = attempt.looked_for
    return {
        "lookup": _ms(looked.waited - looked.notice),
        "notice": _ms(looked.notice),
        "other_load": _ms(attempt.joined_for),
        "until_begun": None if began is None else _ms(began - attempt.asked),
        "load": None if attempt.external and attempt.loaded_at is None else _ms(attempt.loaded_for),
        "until_run": None if ran is None else _ms(ran - attempt.asked),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def lines(account: Account) -> Iterator[str]:
    name = one_line(str(account["request"]))
    yield f"request {name}: {account['state']}, {account['prompt_tokens']} prompt tokens"
    attempts, left_out = account["attempts"], account["attempts_left_out"]
    for number, attempt in enumerate(attempts, 1):
        if len(attempts) > 1:
            again = ", after a preemption" if attempt["preempted"] else ""
            place = number + left_out * (number > MAX_ATTEMPTS // 2)
            yield f"  attempt {place} of {len(attempts) + left_out}{again}"
        yield from _attempt(attempt)
    if not account["holds"]:
        yield "  THE COUNTS DO NOT AGREE with what the engine ran; please report this as a bug"


def _attempt(attempt: Account) -> Iterator[str]:
    yield f"  {_sources(attempt)}"
    for tier in attempt["tiers"]:
        yield f"    {one_line(str(tier['tier']))}: {_tier(tier)}"
    times = {name.replace("_", " "): ms for name, ms in attempt["milliseconds"].items() if ms}
    if times:
        yield "    ms: " + ", ".join(f"{name} {ms:g}" for name, ms in times.items())
    if "waited_for" in attempt:
        yield f"    waited for the load of request {one_line(str(attempt['waited_for']))}"


def _sources(attempt: Account) -> str:
    parts = [(attempt["own_cache"], "own cache")]
    parts += [(tokens, one_line(str(name))) for name, tokens in attempt["loaded"].items()]
    if attempt["elsewhere"]:
        parts.append((attempt["elsewhere"], "elsewhere (another connector, or part of a block)"))
    parts.append((attempt["computed"], "computed"))
    text = " + ".join(f"{'not known' if n is None else n} {name}" for n, name in parts)
    again = " (and the last one again)" if attempt["computed_again"] else ""
    return f"{attempt['tokens']} tokens = {text}{again}"


def _tier(tier: Account) -> str:
    why = REASONS[tier["why"]]
    if tier["why"] == "miss" and tier.get("miss") is not None:
        why = f"it does not have block {tier['miss']}"
    elif tier.get("failed") is not None:
        why = f"{why}: block {tier['failed']}"
    text = f"{'?' if tier['tokens'] is None else tier['tokens']} tokens, {why}"
    if "asked_blocks" in tier:
        text += f"; held {tier['held_blocks']} of {tier['asked_blocks']} blocks asked for"
        if tier["why"] != "miss" and tier["miss"] is not None:
            text += f", not block {tier['miss']}"
        if tier["notice_ms"]:
            took, notice = tier["lookup_ms"], tier["notice_ms"]
            text += f"; answered in {took:g} ms, which the engine took {notice:g} ms later"
    if "wait_ms" in tier:
        times = {name: tier[f"{name}_ms"] for name in PARTS}
        steps = max(0.0, round(tier["wait_ms"] - sum(times.values()), 3))
        parts = ", ".join(f"{name} {ms:g}" for name, ms in {**times, "steps": steps}.items())
        text += f"; {tier['wait_ms']:g} ms ({parts})"
    return text
