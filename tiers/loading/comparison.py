"""Is loading worth it? Only what comes in time, and sooner than it is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Generic, NamedTuple, Protocol, TypeVar

from tiers.loading.load_cost import LEAST_TOKENS, LoadCost, Outliers
from tiers.loading.shares import LoadPace

MARGIN = 0.05
"""Part by which loading must be faster than computing: rates are estimates."""
CROWD = 4
"""Seconds of the engine that a second of computing counts for, at most, where others wait."""
ENOUGH = 0.05
"""A load that takes no more of the time of computing is not compared with other plans."""
LEAST_PATIENCE = 1.0
"""Seconds that a load may take, however fast it should be and the engine is."""
FIRST_PATIENCE = 2.0
"""Seconds that a load may take before the engine has been measured."""
BLIND = 8
"""Requests that load before the engine has been measured. Those that follow compute half of their
prefix until it is, where they leave it nothing to be measured by."""
ENGINE = -1
"""Stands for the engine among the places of tiers, where it is probed."""
SLOWER, BESIDE, LATE = "computing", "engine", "max_wait"
"""Why a tier is passed: computing is sooner, for the load or for what the engine takes beside it;
or the load takes longer than the request may wait."""

P = TypeVar("P", bound="Plan")


class Plan(Protocol):
    """What a load policy would load of a request."""

    @property
    def tokens(self) -> int:
        """Of the prefix that it brings."""
        ...

    @property
    def parts(self) -> Mapping[int, int]:
        """Tokens of each tier that loads, one at least."""
        ...

    def behind(self: P, first: P) -> P:
        """The plan of which `first` loads the first blocks."""
        ...


Propose = Callable[[Collection[int], int | None], P | None]
"""A policy's plan without some of the tiers, of a number of blocks at most; None: it has none."""
Share = Callable[[Mapping[int, LoadPace], Callable[[int], int]], P]
"""The plan in which tiers of these paces share a prefix; see `tiers.loading.shares.share`."""


class Wish(NamedTuple):
    """What a request asks for: at most `blocks`, within `left` seconds, while `others` wait to
    begin."""

    blocks: int
    left: float = math.inf
    others: int = 0


class Verdict(NamedTuple, Generic[P]):
    """The plan to follow; None: nothing is loaded.

    `load`: seconds that its loads take. `saved`: seconds, beside computing all. `passed`: tiers
    that have tokens which are computed, and why: `SLOWER`, `BESIDE` or `LATE`. `probed`: the tier
    that loads only to be measured, or `ENGINE`, which computes so. `seconds`: until the end of the
    prompt. `within`: seconds after which the load is ended.
    """

    plan: P | None
    load: float = 0.0
    saved: float = 0.0
    passed: Mapping[int, str] = MappingProxyType({})
    probed: int | None = None
    seconds: float = 0.0
    within: float = math.inf


class Comparison:
    """Judges the plans of a chain's load policy, and those of no tier until it is to `follow` some.

    A plan whose last tier can't deliver in time, or later than the same tokens are computed, is
    planned again without that tier, until nothing is left; the plan that saves most is followed.
    Computing counts once more for each request that waits to begin, since that one is computed
    later; four times at most. A load that takes as long as was estimated and computing all would
    take, together, is ended.

    A tier that was never measured is taken to need no time, so that the first request after a
    start is served as any other. What that costs at most is computing twice, for the requests that
    come before its first load has ended: what has arrived by then is used, and is its measure. A
    tier that requests skip is probed now and then (see `Exploration`): a request loads its first
    blocks from there, and the rest as it would have. So is the engine where loads leave it little
    to compute, since a step may have taken long by accident: a request computes its last blocks.
    """

    def __init__(self, block_tokens: int, now: Callable[[], float]) -> None:
        self.prefill = PrefillRate(now)
        self._probes = Exploration(least=-(-LEAST_TOKENS // block_tokens))
        self._size = block_tokens
        self._blind = 0
        self.follow({}, always=False, shares=False)

    def follow(self, meters: Mapping[int, LoadCost], always: bool, shares: bool) -> None:
        """Judge plans of these measured tiers, by their places. `always`: all is loaded that comes
        in time. `shares`: the policy has tiers load beside each other what one would take long
        for."""
        self.meters, self.always, self.shares = meters, always, shares

    @property
    def token_seconds(self) -> float | None:
        """Seconds to compute a token, with which loads are compared; None: they are not."""
        return None if self.always else self.prefill.seconds_per_token

    def _each(self, tokens: int) -> float | None:
        """Seconds to compute each of so many tokens, with which a load is compared; None: it is
        not. Too few to measure the engine take a step of such."""
        short = self.prefill.short_step
        if self.prefill.seconds_per_token or self.always or not short or tokens >= MIN_TOKENS:
            return self.token_seconds
        return short / max(1, tokens)

    def _is_long(self, plan: Plan) -> bool:
        """Whether another plan for as many tokens could be sooner by much."""
        each = self.prefill.seconds_per_token
        load = max(self.meters[i].seconds(n) for i, n in plan.parts.items())
        return each is not None and load > ENOUGH * plan.tokens * each

    def shared(self, tiers: Iterable[int], plan: P, share: Share[P]) -> P:
        """The plan, or, where it is long, the same prefix from all measured `tiers` at once."""
        if not self._is_long(plan):
            return plan
        paces = {i: p for i in tiers if i in self.meters and (p := self.meters[i].pace(self._size))}
        if len(paces) < 2 or not plan.parts.keys() <= paces.keys():
            return plan
        found = share(paces, lambda tier: self.meters[tier].failures)
        return found if found.tokens >= plan.tokens else plan

    def choose(self, propose: Propose[P], wish: Wish) -> Verdict[P]:
        """The best of the policy's plans."""
        whole = wish.blocks * self._size
        each = self._each(whole)
        best, cut = self._best(propose, wish, (each or 0.0) * min(CROWD, 1 + wish.others))
        tokens, parts = (0, {}) if best.plan is None else (best.plan.tokens, best.plan.parts)
        passed = {t: why for t, (n, why) in cut.items() if n > tokens and t not in parts}
        computing = (whole - tokens) * (each or self.prefill.seconds_per_token or 0.0)
        found = best._replace(passed=passed, seconds=best.load + computing)
        # Without a plan, and none that was cut off, no tier holds anything to probe it with.
        # Nor is another asked while the policy's own comes in time, if that is all it has to do.
        plan, may_change = best.plan, cut or self.shares or not self.always
        if cut if plan is None else may_change and self._is_long(plan):
            found = self._probing(propose, wish, found)
        if self.always:
            return found
        found = self._measuring(propose, wish, found)
        if each is None:
            return found._replace(within=max(FIRST_PATIENCE, 2 * found.load))
        return found._replace(within=max(LEAST_PATIENCE, found.load + whole * each))

    def hopes(self, waits: Mapping[int, float], found: Verdict[P], wish: Wish) -> bool:
        """Whether one of the tiers that are still looking, if it had everything, would save more
        than is `found`; `waits`: seconds until each answers."""
        each, whole = self.token_seconds, wish.blocks * self._size
        if each is None or not whole:
            return False  # the policy has waited
        worth = whole * each * min(CROWD, 1 + wish.others)
        planned, load = 0 if found.plan is None else found.plan.tokens, found.load
        for tier, wait in waits.items():
            alone = best = self.meters[tier].seconds(whole)
            if self.shares and load > ENOUGH * planned * each:
                # Both end at once, or the tier's own part alone takes longer.
                part = planned / whole
                best = max(load * alone / (load + alone * part), alone * (1 - part))
            if best * (1 + MARGIN) < worth and worth - best - wait > found.saved:
                return True
        return False

    def decided(self, used: Collection[int], probed: int | None, seconds: float) -> None:
        """A request begins that takes `seconds`, and loads from the tiers `used`."""
        if used and self.token_seconds is None:
            self._blind += 1
        for tier in (*self.meters, ENGINE) if used else self.meters:
            if tier == probed:
                self._probes.made(tier)
            elif tier in used:
                self._probes.measured(tier)
            else:
                self._probes.earn(tier, seconds)

    # -- plans -------------------------------------------------------------------------------

    def _best(
        self, propose: Propose[P], wish: Wish, token_worth: float
    ) -> tuple[Verdict[P], dict[int, tuple[int, str]]]:
        """The plan that saves most, and the tiers that were cut off on the way to the last one,
        with the tokens of the plan that each was cut off, and why. `token_worth`: seconds that
        computing a token counts; 0: nothing is compared with it."""
        best: Verdict[P] = Verdict(None)
        cut: dict[int, tuple[int, str]] = {}

        def is_sooner(seconds: float, worth: float) -> bool:
            return not token_worth or seconds * (1 + MARGIN) < worth

        while (plan := propose(cut, None)) is not None:
            worth = plan.tokens * token_worth
            ends = {tier: self.meters[tier].seconds(n) for tier, n in plan.parts.items()}
            last = max(ends, key=ends.__getitem__)
            load, beside = ends[last], max(self.meters[tier].engine_seconds for tier in ends)
            why, pays = SLOWER, is_sooner(load, worth)
            if pays and load > wish.left:
                why = LATE
            elif pays and not is_sooner(load + beside, worth):
                why = BESIDE
            elif pays and (best.plan is None or worth - load > best.saved):
                best = Verdict(plan, load, worth - load)
                if not token_worth or load <= ENOUGH * worth:
                    break
            cut[last] = plan.tokens, why
        return best, cut

    # -- probes ------------------------------------------------------------------------------

    def _probing(self, propose: Propose[P], wish: Wish, found: Verdict[P]) -> Verdict[P]:
        """The verdict with a probe of a tier that it does not use, if one is due."""
        used = found.plan.parts if found.plan is not None else {}
        for tier in self.meters.keys() - used.keys():
            meter = self.meters[tier]
            least = meter.seconds(LEAST_TOKENS) / 10
            if meter.is_loading or not self._probes.is_due(tier, least):
                continue
            probe = self._probe(propose, wish, tier)
            if probe is None:
                continue
            seconds = meter.seconds(probe.tokens)
            if self._probes.is_due(tier, max(seconds - found.load, seconds / 10)):
                plan = probe if found.plan is None else found.plan.behind(probe)
                left = {i: why for i, why in found.passed.items() if i != tier}
                load = max(found.load, seconds)
                return found._replace(plan=plan, load=load, probed=tier, passed=left)
        return found

    def _measuring(self, propose: Propose[P], wish: Wish, found: Verdict[P]) -> Verdict[P]:
        """The verdict with so much less to load that the engine is measured, if that is due."""
        plan, each = found.plan, self.prefill.seconds_per_token
        loaded = 0 if plan is None else plan.tokens // self._size
        less = self._probes.length(ENGINE)
        if wish.blocks - loaded >= less:
            self._probes.measured(ENGINE)
            return found
        if plan is None or found.probed is not None:
            return found

        def is_due(blocks: int) -> bool:
            if each is None:
                return self._blind >= BLIND
            return self._probes.is_due(ENGINE, blocks * self._size * each)

        less = loaded // 2 if each is None else min(less, loaded // 2)
        if less < self._probes.least or not is_due(less):
            return found
        shorter = propose(self.meters.keys() - plan.parts.keys(), loaded - less)
        if shorter is not None and is_due(loaded - shorter.tokens // self._size):
            return found._replace(plan=shorter, probed=ENGINE)
        return found  # it could end only long before

    def _probe(self, propose: Propose[P], wish: Wish, tier: int) -> P | None:
        """What a tier alone would load of the first blocks, with which it is to be probed."""
        others = self.meters.keys() - {tier}
        each, whole = self.token_seconds, wish.blocks * self._size
        length = self._probes.length(tier)
        if each is not None and self.meters[tier].seconds(length * self._size) > whole * each:
            self._probes.shorten(tier)  # too much for one request
            length = self._probes.least
        return propose(others, length)


KEEP = 0.7
"""Weight of all earlier steps when one is measured."""
IN_FLIGHT = 64
"""Steps kept that have not ended; no engine prepares as many."""
MIN_TOKENS = 64
"""Of a step that is measured: one that mostly decodes has fewer prompt tokens."""


class PrefillRate:
    """Prompt tokens per second, over steps that compute at least `MIN_TOKENS` of them.

    A measured step has a number, which crosses to the workers and back. It has taken the time from
    when it was scheduled, or from the end of the step before it where that is later, to when its
    results came back. So the engine's idle time counts for nothing, and an engine that schedules
    ahead of its results (asynchronous scheduling, pipelines) is measured by the distance of its
    results. Decoding in the same step counts as part of what a prompt costs. Used by one thread
    alone.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._steps: dict[int, tuple[int, float]] = {}
        self._number = 0
        self._last_end = -math.inf
        self._tokens = self._seconds = 0.0
        self._outliers = Outliers()
        self.short_step: float | None = None
        """Seconds of the last step of fewer tokens; None: there was none."""

    @property
    def seconds_per_token(self) -> float | None:
        """None: not measured yet."""
        return self._seconds / self._tokens if self._tokens else None

    def step_begins(self, tokens: int) -> int | None:
        """Note that a step computes `tokens` of prompts; its number, if it is to be measured."""
        if not tokens:
            return None
        self._number += 1
        self._steps[self._number] = (tokens, self._now())
        # The results of a step that failed never come.
        self._steps.pop(self._number - IN_FLIGHT, None)
        return self._number

    def step_ended(self, number: int | None) -> bool:
        """Note that a step's results are here; whether they measure the engine."""
        now, before = self._now(), self._last_end
        self._last_end = now
        if number is None or number not in self._steps:
            return False
        tokens, scheduled = self._steps.pop(number)
        return self.measured(tokens, now - max(scheduled, before))

    def measured(self, tokens: int, seconds: float) -> bool:
        """Take in a step that computed `tokens`; whether it counts."""
        if tokens < MIN_TOKENS:
            self.short_step = seconds
            return False
        if (each := self.seconds_per_token) is not None:
            seconds, has_changed = self._outliers.clamp(seconds, max(tokens * each, 1e-9))
            if has_changed:
                self._tokens = self._seconds = 0.0
        self._tokens = KEEP * self._tokens + tokens
        self._seconds = KEEP * self._seconds + seconds
        return True


SHARE = 0.01
"""Part of the requests' time that probes of one tier may cost."""
LONGEST = 16
"""Doublings of a probe's length, at most: no prompt has as many blocks."""


class Exploration:
    """When a tier that requests skip is probed again, and with how many blocks.

    Each request that skips the tier adds a part of its duration (`SHARE`) to the tier's probe
    budget; the tier is probed once the budget covers the probe. Probes double in length until the
    tier is used again, since few blocks hardly measure its bandwidth.
    """

    def __init__(self, least: int) -> None:
        """`least`: blocks of the shortest probe."""
        self.least = least
        self._made: dict[int, int] = {}
        self._earned: dict[int, float] = {}

    def length(self, tier: int) -> int:
        """Blocks that the next probe should have."""
        return self.least << self._made.get(tier, 0)

    def earn(self, tier: int, seconds: float) -> None:
        """A request that takes `seconds` skips the tier."""
        self._earned[tier] = self._earned.get(tier, 0.0) + SHARE * seconds

    def is_due(self, tier: int, cost: float) -> bool:
        """Whether the tier's budget covers a probe that costs `cost` seconds."""
        return cost <= self._earned.get(tier, 0.0)

    def made(self, tier: int) -> None:
        self._made[tier] = min(LONGEST, self._made.get(tier, 0) + 1)
        self._earned.pop(tier, None)

    def shorten(self, tier: int) -> None:
        """Make the next probe the shortest again."""
        self._made.pop(tier, None)

    def measured(self, tier: int) -> None:
        """The tier is in use: it needs no probe."""
        self._made.pop(tier, None)
        self._earned.pop(tier, None)
