"""The chains that a budget allows, the sizes worth trying, and the steps between chains.

A chain differs from another by one step if one choice differs: a tier more or less, two tiers
swapped, the load policy, whether all is loaded, promotion, or one setting of one tier.

Sizes worth trying of a medium are the most and its halves. The most is the limit, or the need of an
LRU that serves all that any cache could serve of the searched requests. The curve is flat from
there on for every policy. A curve that is flat somewhere below shows nothing: it is LRU's, and ARC
or a store threshold may use that room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations, product
from math import log2

from spec.chain import LOAD_POLICIES
from spec.fields import exact_size, format_rate
from tiers.tuning.curve import Curves
from tiers.tuning.machine import Machine
from tiers.tuning.report import DAY, YEAR
from tiers.tuning.search.budget import CHOSEN, Budget, BudgetMedium
from tiers.tuning.simulation.sim_chain import SimChain, SimTier

HALVES = 4
FLAT = 0.002
"""Hit ratios are equal that differ by less of what no cache could serve, and is computed."""
SPARE = 1.1
"""Blocks in flight take room too: sizes are this much larger than the curve says."""
GROWS = 1.25
"""A trace grows if all of it needs this many times the room of its first half."""
SETTLED = 0.1
"""It also grows if the share of blocks that could be served is this much higher in its second half
than in its first."""
ALL = 1 << 62
"""More bytes than any trace has."""


def growth(curves: Curves) -> str | None:
    """Why the requests after these would reuse more than these show; None: they would not."""
    if curves.halves is None:
        return None
    early, late = curves.halves
    needs = [max(1, _least(curve.useful or 1, curve.ratio)) for curve in (early, curves.all)]
    if needs[1] > GROWS * needs[0]:
        return f"all of it needs {needs[1] / needs[0]:.1f} times the room of its first half"
    shares = [curve.ratio(curve.useful) for curve in (early, late)]
    if shares[1] > shares[0] + SETTLED and early.useful < late.useful:
        return f"{shares[0]:.0%} of its first half could be served, {shares[1]:.0%} of its second"
    return None


def worth_trying(
    budget: Budget, hit_ratio: Callable[[int], float]
) -> Mapping[str, tuple[int, ...]]:
    """The sizes of each medium in bytes, the largest first. `hit_ratio`: of an LRU of some bytes,
    over the requests that are searched."""
    sizes = {}
    for medium in budget.media:
        top = min(medium.limit, _round(SPARE * _least(medium.limit, hit_ratio)))
        halves = [_round(top / 2**half) for half in range(1, HALVES + 1)]
        sizes[medium.type] = (top, *dict.fromkeys(size for size in halves if size < top))
    return sizes


def _least(limit: int, ratio: Callable[[int], float]) -> int:
    """The least size that serves all that can be served, or the limit if that does not."""
    low, high, enough = 0, limit, ratio(ALL) - FLAT * (1 - ratio(ALL))
    # To a part of what suffices, not of the limit, which may be thousands of times as much.
    while high - low > max(1, high / 64):
        middle = (low + high) // 2
        low, high = (low, middle) if ratio(middle) >= enough else (middle, high)
    return high


def _round(size: float) -> int:
    """A size as people write it: two digits of GB or more, else of MB."""
    unit = 10**9 if size >= 10**10 else 10**6 if size >= 10**7 else 10**3
    count = size / unit
    digits = 10 ** max(0, len(str(int(count))) - 2)
    return max(1, round(count / digits) * digits) * unit if size >= 10**4 else max(1, int(size))


POLICIES: tuple[str, ...] = ("stitched", *(p for p in LOAD_POLICIES if p != "stitched"))
"""All load policies, the default first."""
THRESHOLDS = (1, 2, 3)
LOAD_WHEN: tuple[str, ...] = ("sooner", "always")
"""The default first."""


@dataclass(frozen=True)
class ChainStep:
    """A chain one step away: the difference (`kind`: `tiers`, `order` or a key of the YAML), its
    tier, and its wording."""

    kind: str
    tier: str | None
    text: str
    chain: SimChain


class Space:
    """The chains of a budget. `sizes`: bytes that are worth trying for each tier type, the largest
    first. `present`: a chain with a tier of each type at most. Then its sizes are worth trying too,
    all that no search chooses is as in it, and of equal chains the simplest is the one with the
    fewest changes."""

    def __init__(
        self, budget: Budget, sizes: Mapping[str, Sequence[int]], present: SimChain | None = None
    ) -> None:
        self.budget = budget
        self.present = present
        self._base = SimChain(())
        self._rates = {m.type: write_budgets(m, budget) for m in budget.media}
        self._given = {m.type: SimTier.of(m.tier()) for m in budget.media}
        if present is not None:
            self._base = replace(present, tiers=())
            now = {tier.type: tier for tier in present.tiers if tier.type in self._given}
            self._given |= now
            for kind, tier in now.items():
                if tier.write_budget is not None:
                    self._rates[kind] = (tier.write_budget, *filter(None, self._rates[kind]))
                sizes = {**sizes, kind: sorted({*sizes[kind], tier.capacity or 0}, reverse=True)}
        self.sizes = sizes

    def tier(self, medium: BudgetMedium) -> SimTier:
        """A medium's tier with its settings and else the defaults, as large as is worth trying;
        where a life is asked for, with the write budget that gives it."""
        size, rate = self.sizes[medium.type][0], self._rates[medium.type][-1]
        return replace(self._given[medium.type], capacity=size, write_budget=rate)

    def starts(self) -> Iterator[SimChain]:
        """No tiers, then each order of each choice of media, with defaults for the rest; the
        fastest first also with each load policy, and a tier that has a write budget also with a
        store threshold, which spends less of it."""
        if self.present is not None:
            yield self.present
        yield replace(self._base, tiers=())
        media = []
        for tier in map(self.tier, self._by_speed()):
            thresholds = THRESHOLDS[: 1 if tier.write_budget is None else 2]
            media.append([replace(tier, store_threshold=threshold) for threshold in thresholds])
        for count in range(1, len(media) + 1):
            for choices in permutations(media, count):
                yield from (replace(self._base, tiers=tiers) for tiers in product(*choices))
            for choices in combinations(media, count):
                tiers = tuple(choice[0] for choice in choices)
                for policy in policies(count):
                    yield replace(self._base, tiers=tiers, load_policy=policy)

    def fastest_first(self) -> SimChain:
        """A careful guess: all media in the order of their bandwidth, `stitched`."""
        return replace(self._base, tiers=tuple(map(self.tier, self._by_speed())))

    def _by_speed(self) -> list[BudgetMedium]:
        tiers = self.budget.machine.tiers
        return sorted(self.budget.media, key=lambda m: -tiers[m.type].load_bandwidth)

    def steps(self, chain: SimChain) -> Iterator[ChainStep]:
        """All chains one step from a chain that has tiers."""
        yield from self._tiers(chain)
        for policy in policies(len(chain.tiers)):
            if policy != chain.load_policy:
                yield ChainStep("load_policy", None, policy, replace(chain, load_policy=policy))
        for when in LOAD_WHEN if self._may_be_slow(chain.tiers) else ():
            if when != chain.load_when:
                yield ChainStep("load_when", None, when, replace(chain, load_when=when))
        if len(chain.tiers) > 1:
            text = str(not chain.promote).lower()
            yield ChainStep("promote", None, text, replace(chain, promote=not chain.promote))
        for tier in chain.tiers:
            yield from self._settings(chain, tier)

    def _tiers(self, chain: SimChain) -> Iterator[ChainStep]:
        tiers = chain.tiers
        for at, tier in enumerate(tiers):
            less = (*tiers[:at], *tiers[at + 1 :])
            yield ChainStep("tiers", tier.type, "left out", self._of(chain, less))
        for at in range(1, len(tiers)):
            swapped = (*tiers[: at - 1], tiers[at], tiers[at - 1], *tiers[at + 1 :])
            text = f"{tiers[at].type} before {tiers[at - 1].type}"
            yield ChainStep("order", tiers[at].type, text, self._of(chain, swapped))
        for medium in self.budget.media:
            if all(medium.type != tier.type for tier in tiers):
                new = self.tier(medium)
                for at in range(len(tiers) + 1):
                    more = (*tiers[:at], new, *tiers[at:])
                    yield ChainStep("tiers", medium.type, "added", self._of(chain, more))

    def _of(self, chain: SimChain, tiers: tuple[SimTier, ...]) -> SimChain:
        """The chain with other tiers, and without settings that mean nothing for these."""
        known, base = chain.load_policy in policies(len(tiers)), self._base
        policy = chain.load_policy if known else base.load_policy
        when = chain.load_when if self._may_be_slow(tiers) else base.load_when
        promote = chain.promote if len(tiers) > 1 else base.promote
        return replace(chain, tiers=tiers, load_policy=policy, load_when=when, promote=promote)

    def _may_be_slow(self, tiers: Sequence[SimTier]) -> bool:
        """Whether computing may be sooner than loading: all GPUs together compute more KV in a
        second than some tier loads."""
        machine = self.budget.machine
        computed = machine.gpus * machine.prefill_rate * machine.kv_bytes_per_token
        return any(machine.tiers[tier.type].load_bandwidth < computed for tier in tiers)

    def _settings(self, chain: SimChain, tier: SimTier) -> Iterator[ChainStep]:
        medium = self.budget.medium(tier.type)
        sizes = self.sizes[tier.type]
        at = sizes.index(tier.capacity) if tier.capacity in sizes else -1
        for near in {at - 1, at + 1} & set(range(len(sizes))):
            yield _with(chain, tier, "capacity", exact_size(sizes[near]), sizes[near])
        for eviction in medium.evictions:
            if eviction != tier.eviction:
                yield _with(chain, tier, "eviction", eviction, eviction)
        for threshold in THRESHOLDS:
            if abs(threshold - tier.store_threshold) == 1:
                yield _with(chain, tier, "store_threshold", str(threshold), threshold)
        for rate in self._rates[tier.type]:
            if rate != tier.write_budget:
                text = "none" if rate is None else format_rate(rate)
                yield _with(chain, tier, "write_budget", text, rate)

    def simplicity(self, chain: SimChain) -> tuple[float, ...]:
        """A chain's place among equal ones, the simplest first."""
        if self.present is None:
            return simplicity(chain, self.budget.machine)
        return (*distance(chain, self.present), *simplicity(chain, self.budget.machine))


def distance(chain: SimChain, present: SimChain) -> tuple[float, float]:
    """How many changes lead from one chain to another, and how large those of sizes are, in
    doublings. Their tiers differ in type."""
    ours, theirs = ({tier.type: tier for tier in each.tiers} for each in (chain, present))
    shared = [kind for kind in theirs if kind in ours]
    count = len(ours.keys() ^ theirs.keys()) + (shared != [kind for kind in ours if kind in theirs])
    count += sum(getattr(chain, key) != getattr(present, key) for key in CHOSEN)
    keys = ("capacity", "eviction", "store_threshold", "write_budget")
    pairs = [(ours[kind], theirs[kind]) for kind in shared]
    count += sum(getattr(one, key) != getattr(other, key) for one, other in pairs for key in keys)
    doublings = (log2((one.capacity or 1) / (other.capacity or 1)) for one, other in pairs)
    return count, sum(map(abs, doublings))


def policies(tiers: int) -> tuple[str, ...]:
    """The load policies that differ for this number of tiers."""
    return POLICIES if tiers > 1 else POLICIES[:1]


def write_budgets(medium: BudgetMedium, budget: Budget) -> tuple[float | None, ...]:
    """No write budget, and the one that lets a device last as long as is asked."""
    endurance = budget.machine.tiers[medium.type].endurance
    years = budget.constraints.life_years
    if endurance is None or years is None or medium.is_host:
        return (None,)
    a_day = int(endurance / (years * YEAR) * DAY)
    scale = 10 ** max(0, len(str(a_day)) - 3)  # no more digits than an operator would write
    return (None, max(1, a_day // scale * scale) / DAY)


def _with(chain: SimChain, tier: SimTier, key: str, text: str, value: object) -> ChainStep:
    tiers = tuple(replace(t, **{key: value}) if t is tier else t for t in chain.tiers)  # type: ignore[arg-type]
    return ChainStep(key, tier.type, text, replace(chain, tiers=tiers))


def simplicity(chain: SimChain, machine: Machine) -> tuple[float, ...]:
    """A chain's place among equal ones, the simplest first: few tiers, few settings that are not
    the default (a slower tier before a faster one counts as one), a low price, few bytes."""
    settings = (chain.load_policy != POLICIES[0]) + (not chain.promote)
    settings += chain.load_when != LOAD_WHEN[0]
    speeds = [machine.tiers[tier.type].load_bandwidth for tier in chain.tiers]
    settings += sum(above < below for above, below in combinations(speeds, 2))
    for tier in chain.tiers:
        settings += (tier.eviction != "lru") + (tier.store_threshold > 1)
        settings += tier.write_budget is not None
    price = sum(
        (machine.tiers[t.type].price_per_gb_month or 0.0) * (t.capacity or 0) / 1e9
        for t in chain.tiers
    )
    return (len(chain.tiers), settings, price, sum(t.capacity or 0 for t in chain.tiers))
