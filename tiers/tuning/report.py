"""Report: links, disks, GPUs and waiting times of serving a trace with a chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from spec.text import aligned, decimal_size, seconds

TRUSTED_LOAD = 0.65
"""GPU load or link use beyond which waiting times are not to be trusted: a rate that is 5% wrong
moves the median by 5 to 12% below it, and by some hundred percent near 1."""
TRUSTED_ROOM_WAIT = 0.25
"""The same of the time in which the next prompt waits for room in the engine's memory: beyond it a
rate that is 5% wrong moves the median by up to 20%, however idle GPUs and links are."""
LONG_PAUSE, BY_CHANCE = 0.1, 20
"""Share of the time without a request at a stretch beyond which the rest is busier than said, and
how many mean gaps are no chance."""
SHORT_LIFE = 1.0
"""Years below which a device's life is warned of."""
DAY = 86400.0
YEAR = 365.25 * DAY
MONTH = YEAR / 12


class Served(NamedTuple):
    """A prompt that was served: seconds from its arrival to its end, its tokens, those of them
    that the engine's own cache had, and that tiers loaded, and the tokens of its answer."""

    wait: float
    tokens: int
    own: int
    loaded: int
    answer: int


class RoomWait:
    """Seconds in which the next prompt in line waited for room in the engine's memory."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._since: float | None = None

    def refused(self, now: float) -> None:
        """The next prompt finds no room."""
        if self._since is None:
            self._since = now

    def began(self, now: float) -> None:
        """The next prompt has begun."""
        self._sum, self._since = self.until(now), None

    def until(self, now: float) -> float:
        """All of them by now."""
        return self._sum + (0.0 if self._since is None else now - self._since)


@dataclass(slots=True)
class TierCounts:
    """Counts of a tier so far, in tokens, blocks and seconds."""

    hit_tokens: int = 0
    """Loaded, and in time."""
    loaded: int = 0
    dropped: int = 0
    """Admitted, and without a slot so far."""
    stored: int = 0
    load_busy: float = 0.0
    store_busy: float = 0.0
    held: float | None = None
    """Blocks that it holds; None: it was full once, or it is not known."""


class Mark(NamedTuple):
    """Counts of a moment: seconds, of all GPUs together, and those of each tier."""

    now: float
    gpu_busy: float
    room_wait: float
    tiers: Sequence[TierCounts]


class Stretch(NamedTuple):
    """Some prompts that ended one after another."""

    ttft_mean: float
    ttft_p99: float
    computed_tokens: int
    tier_tokens: int


@dataclass(frozen=True)
class TierUse:
    """The work of a tier while it was measured. Blocks and bytes are of whole blocks, all ranks."""

    name: str
    hit_tokens: int
    """Prompt tokens that it loaded."""
    load_busy: float
    """Share of the time in which its link carried loads, from 0 to 1 (more: overrun)."""
    store_busy: float
    """The same for stores."""
    loaded_bytes: int
    stored_bytes: int
    written_bytes_per_day: float
    offered_blocks: int
    """Blocks that it missed and its rules admit: stored and dropped together."""
    dropped_blocks: int
    """Those of them that were not stored: no slot, too many bytes in flight, or no budget."""
    life_years: float | None = None
    """Years until its endurance is used up; None: not given, or nothing is written."""
    price_per_month: float | None = None
    held_bytes: int | None = None
    """Bytes that it holds in the end; None: it was full once, or was not simulated."""

    @property
    def dropped_share(self) -> float:
        return self.dropped_blocks / self.offered_blocks if self.offered_blocks else 0.0


@dataclass(frozen=True)
class Report:
    """The result of serving a trace; requests that only warm the caches are not counted.

    `seconds`: from the first counted arrival to the end of the last prompt, or of the trace.
    Tokens: prompt = engine's own cache + tiers + computed.
    """

    requests: int
    seconds: float
    gpu_load: float
    """Share of the time in which GPUs computed prompts, over all of them."""
    tiers: tuple[TierUse, ...]
    prompt_tokens: int
    engine_hit_tokens: int
    computed_tokens: int
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    """Seconds from arrival to the end of the prompt."""
    prefill_seconds_saved: float
    """GPU seconds that tokens from tiers would have taken to compute."""
    stretches: tuple[Stretch, ...] = ()
    """Equal parts of the counted prompts, in the order in which they ended: how much they vary."""
    room_wait: float = 0.0
    """Share of the time in which the next prompt waited for room in the engine's own memory."""
    pause: float = 0.0
    """Share of the time in the longest stretch of it in which no request came."""
    too_long: int = 0
    """Counted prompts that the engine's own cache can't hold, so that no engine serves them."""
    free_answers: bool = False
    """Answers were taken to need no time, and so no room beside the prompts."""

    @property
    def hit_tokens(self) -> Mapping[str, int]:
        return {tier.name: tier.hit_tokens for tier in self.tiers}

    @property
    def tier_hit_tokens(self) -> int:
        return sum(tier.hit_tokens for tier in self.tiers)

    @property
    def price_per_month(self) -> float | None:
        prices = [t.price_per_month for t in self.tiers if t.price_per_month is not None]
        return sum(prices) if prices else None

    @property
    def cost_per_million_saved_tokens(self) -> float | None:
        """Price of a million tokens that tiers served; None without prices or hits."""
        price, saved = self.price_per_month, self.tier_hit_tokens
        return price / MONTH * self.seconds / (saved / 1e6) if price is not None and saved else None

    @property
    def warnings(self) -> list[str]:
        """Why figures are not to be trusted, where they are not."""
        found = []
        if self.too_long:
            found.append(
                f"{self.too_long:,} prompts are longer than the engine's cache, and no engine "
                "serves such: give the machine more engine_cache"
            )
        if self.pause > max(LONG_PAUSE, BY_CHANCE / max(1, self.requests)):
            found.append(
                f"no request came for {self.pause:.0%} of the time at a stretch: what is busy, and "
                "what is written a day, are means over it. Unless the engine was idle then, name "
                "only files from before or after it"
            )
        if self.free_answers:
            found.append(
                "answers are taken to need no time, and so hold no memory: waiting times are too "
                "short where that is scarce. Write the machine's decode_seconds_per_token"
            )
        found += [
            f"{tier.name} is written to death in {tier.life_years * 365.25:.0f} days: give "
            "it a write_budget or a store_threshold, or life_years to the search"
            for tier in self.tiers
            if tier.life_years is not None and tier.life_years < SHORT_LIFE
        ]
        found += [
            f"{what} are busy for {share:.0%} of the time: beyond {TRUSTED_LOAD:.0%} a rate that "
            "is a few percent wrong changes waiting times many times over, so trust hit tokens "
            "and shares here, and not times"
            for what, share in (
                ("the GPUs", self.gpu_load),
                *((f"{tier.name}'s loads", tier.load_busy) for tier in self.tiers),
            )
            if share > TRUSTED_LOAD
        ]
        if self.room_wait > TRUSTED_ROOM_WAIT:
            found.append(
                f"prompts wait for room in the engine's memory for {self.room_wait:.0%} of the "
                f"time: beyond {TRUSTED_ROOM_WAIT:.0%} small errors add up in its queue, so trust "
                "hit tokens and shares here, and not times: more engine_cache shortens it"
            )
        found += [
            f"{tier.name}'s stores are busy for {tier.store_busy:.0%} of the time: beyond "
            f"{TRUSTED_LOAD:.0%} they lag, and it drops what finds no room "
            f"({tier.dropped_share:.0%} here)"
            for tier in self.tiers
            if tier.store_busy > TRUSTED_LOAD
        ]
        return found

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        for tier, use in zip(found["tiers"], self.tiers, strict=True):
            tier["dropped_share"] = use.dropped_share
        return {
            "warnings": self.warnings,
            **found,
            "price_per_month": self.price_per_month,
            "cost_per_million_saved_tokens": self.cost_per_million_saved_tokens,
        }


_COLUMNS = ("tier", "loads", "stores", "written", "SSD life", "dropped", "hit tokens", "of all")


def table(report: Report) -> str:
    """A row for each tier, then the lines for all of them, then the warnings."""
    rows = [_COLUMNS, *(_row(tier, report.prompt_tokens) for tier in report.tiers)]
    lines = aligned(rows, left=1) if report.tiers else []
    return "\n".join([*lines, *_sums(report), *(f"warning: {text}" for text in report.warnings)])


def named(rows: Sequence[Sequence[str]], names: Sequence[str]) -> str:
    """A table whose rows but the first have a name each, on a line below."""
    head, *lines = aligned(rows)
    pairs = (f"{line}\n    {text}" for line, text in zip(lines, names, strict=True))
    return "\n".join([head, *pairs])


def waits(report: Report) -> tuple[str, str, str]:
    """Cells: mean, median and 99th percentile of the time to the first token."""
    return (seconds(report.ttft_mean), seconds(report.ttft_p50), seconds(report.ttft_p99))


def life_and_price(report: Report) -> tuple[str, str]:
    """Cells: of the tier that lasts least, and of all of them."""
    lives = [tier.life_years for tier in report.tiers if tier.life_years is not None]
    price = report.price_per_month
    return f"{min(lives):.2g} y" if lives else "-", "-" if price is None else f"{price:,.0f}"


def _row(tier: TierUse, prompt_tokens: int) -> tuple[str, ...]:
    years, life = tier.life_years, "-"
    if years is not None:
        life = f"{years:.1f} years" if years >= 1 else f"{years * 365.25:.3g} days"
    return (
        tier.name,
        f"{tier.load_busy:.0%} busy",
        f"{tier.store_busy:.0%} busy",
        f"{decimal_size(tier.written_bytes_per_day)}/day",
        life,
        f"{tier.dropped_share:.1%}",
        f"{tier.hit_tokens:,}",
        _share(tier.hit_tokens, prompt_tokens),
    )


def _sums(report: Report) -> list[str]:
    own = _share(report.engine_hit_tokens, report.prompt_tokens)
    computed = _share(report.computed_tokens, report.prompt_tokens)
    lines = [
        f"GPUs are busy for {report.gpu_load:.0%} of the time",
        f"{report.requests:,} requests of {report.prompt_tokens:,} prompt tokens: {own} from the "
        f"engine's own cache, {_share(report.tier_hit_tokens, report.prompt_tokens)} from tiers, "
        f"{computed} computed",
        f"time to first token: mean {seconds(report.ttft_mean)}, median "
        f"{seconds(report.ttft_p50)}, 99th percentile {seconds(report.ttft_p99)}",
        f"prefill saved: {report.prefill_seconds_saved:,.0f} GPU seconds in "
        f"{report.seconds:,.0f} s",
    ]
    cost = report.cost_per_million_saved_tokens
    if cost is not None:
        lines.append(f"price of a million tokens from tiers: {cost:.4g}")
    return lines


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
