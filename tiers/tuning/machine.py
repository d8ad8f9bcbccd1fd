"""Machine: the engine and the tiers' links of a chain, their speed and their price."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    PlainSerializer,
    ValidationInfo,
    model_validator,
)

from spec.errors import SpecError
from spec.fields import exact_size, format_rate, parse_duration, parse_rate, parse_size
from spec.load import load_document
from spec.offloading import OffloadingSpec
from spec.problems import problem_line
from tiers.tuning.report import DAY, YEAR

KNOWN = "known"
"""The key, in a validation's context, of the values that a machine or a budget may leave out."""
EXAMPLE = (
    "write kv_bytes_per_token, engine_cache and prefill_rate: kvtiers curve prints the first of a "
    "recording, vLLM's line KV cache size the tokens of the second, kvtiers status the third; and "
    "decode_seconds_per_token, the mean of vLLM's metric inter_token_latency_seconds"
)


def _or_number(parse: Callable[[object], float]) -> Callable[[object], object]:
    """Take a number as it is, zero too, and let `parse` read text."""

    def read(value: object) -> object:
        return parse(value) if isinstance(value, str) else value

    return read


Size = Annotated[
    int,
    BeforeValidator(_or_number(parse_size)),
    PlainSerializer(lambda v: exact_size(v) if v else 0, when_used="json"),
    Field(ge=0),
]
"""Bytes: a number, or text like "8GiB"."""
Bandwidth = Annotated[
    float,
    BeforeValidator(_or_number(parse_rate)),
    PlainSerializer(format_rate, when_used="json"),
    Field(gt=0, allow_inf_nan=False),
]
"""Bytes per second: a number, or text like "5GB/s"."""
Seconds = Annotated[
    float, BeforeValidator(_or_number(parse_duration)), Field(ge=0, allow_inf_nan=False)
]
"""Seconds: a number, or text like "2ms"."""

Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""In any currency, the same for all."""

SIZE_KEYS = ("capacity", "maxmemory")
"""Keys of a tier's YAML that say how many bytes of blocks it has room for: its own, a server's."""


def size_key(tier: type[OffloadingSpec]) -> str | None:
    """That key of a tier type; None: it has none."""
    return next((key for key in SIZE_KEYS if key in tier.model_fields), None)


def size_of(tier: OffloadingSpec) -> int | None:
    """How many bytes of blocks a tier's YAML says it has room for; None: it does not say."""
    found = getattr(tier, size_key(type(tier)) or "", None)
    return found if isinstance(found, int) else None


class TierProfile(BaseModel, frozen=True, extra="forbid"):
    """How fast a tier moves blocks, and what it costs. Frozen; unknown keys are refused."""

    load_bandwidth: Bandwidth = Field(description="Bytes loaded per second, by all loads at once.")
    store_bandwidth: Bandwidth = Field(description="Bytes stored per second.")
    load_latency: Seconds = Field(default=0.0, description="Seconds until a load's first byte.")
    store_latency: Seconds = Field(default=0.0, description="Seconds that each store takes more.")
    shared_link: bool = Field(
        default=False, description="Whether loads and stores take bandwidth from each other."
    )
    price_per_gb_month: Price | None = Field(
        default=None, description="Price of a gigabyte (1e9 bytes) of capacity for a month."
    )
    price_per_month: Price | None = Field(
        default=None, description="Price of the device for a month, whatever is used of it."
    )
    endurance: Size | None = Field(
        default=None, description="Bytes that may be written to the device in its life."
    )

    def price(self, capacity: int | None) -> float | None:
        """Price of a month with `capacity` bytes; None: no price is given."""
        if self.price_per_gb_month is None or capacity is None:
            return self.price_per_month
        return (self.price_per_month or 0.0) + self.price_per_gb_month * capacity / 1e9

    def life_years(self, a_day: float, write_budget: float | None) -> float | None:
        """Years until the endurance is used up by `a_day` bytes a day, or by the write budget's, in
        bytes a second, if that is less: savings of it are spent once, and not every day. None: no
        endurance is given, or nothing is written."""
        if write_budget is not None:
            a_day = min(a_day, write_budget * DAY)
        return self.endurance / a_day * DAY / YEAR if self.endurance is not None and a_day else None


class Machine(BaseModel, frozen=True, extra="forbid"):
    """The engine and the tiers of a chain. Frozen; unknown keys are refused.

    The GPUs share one scheduler, one prefix cache and one chain, and each computes one step at a
    time. For tensor parallelism write one GPU with the rate of all of them.
    """

    kv_bytes_per_token: int = Field(gt=0, description="KV bytes of a token, all layers and ranks.")
    engine_cache: Size = Field(description="Bytes of KV that the engine keeps itself, all GPUs.")
    prefill_rate: float = Field(
        gt=0, allow_inf_nan=False, description="Prompt tokens that a GPU computes per second."
    )
    gpus: int = Field(default=1, ge=1, description="GPUs that compute prompts.")
    step_tokens: int = Field(
        default=8192, ge=1, description="Tokens of a step at most (--max-num-batched-tokens)."
    )
    decode_seconds_per_token: Seconds = Field(
        default=0.0, description="Seconds a request runs on for each token of its answer."
    )
    tiers: Mapping[str, TierProfile] = Field(
        default_factory=dict, description="A profile for each tier, by its name or its type."
    )

    @model_validator(mode="before")
    @classmethod
    def _know(cls, written: object, info: ValidationInfo) -> object:
        known = (info.context or {}).get(KNOWN, {}).get("machine")
        if known is None or not isinstance(written, Mapping):
            return written
        tiers = written.get("tiers", {})
        if isinstance(tiers, Mapping):
            given = known["tiers"]
            tiers = given | {
                name: {**given.get(name, {}), **tier} if isinstance(tier, Mapping) else tier
                for name, tier in tiers.items()
            }
        return {**known, **written, "tiers": tiers}

    def profile(self, name: str, tier_type: str) -> TierProfile:
        """The profile of a tier. Raises SpecError where neither name nor type has one."""
        found = self.tiers.get(name) or self.tiers.get(tier_type)
        if found is None:
            known = ", ".join(sorted(self.tiers)) or "none"
            line = problem_line(
                "profile",
                None,
                ("tiers",),
                f"profiles of {known}",
                f"add {name}: {{load_bandwidth: 5GB/s, store_bandwidth: 3GB/s}}",
            )
            raise SpecError([line])
        return found


def load_machine(path: str | Path, known: Mapping[str, Any] | None = None) -> Machine:
    """Read a machine from a YAML or JSON file. What it leaves out is as in `known["machine"]`.

    Raises SpecError with a line for each problem: file, line, key, what was found, what would do.
    """
    return load_document(Path(path), Machine, EXAMPLE, {KNOWN: known or {}})
