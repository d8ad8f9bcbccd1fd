"""Budget: the media that an operator could have, their machine, and the objective."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from spec.errors import SpecError, one_of
from spec.fields import ByteSize, Duration
from spec.load import load_document
from spec.offloading import HostSpec, OffloadingSpec
from spec.plugins import BrokenPlugin, UnknownPlugin
from spec.registry import make_tier, tier_class
from tiers.tuning.machine import KNOWN, SIZE_KEYS, Machine, Price, load_machine, size_key
from tiers.tuning.simulation.spaces import SPACES

Objective = Literal["mean_ttft", "p99_ttft", "saved_seconds", "cost"]

_EXAMPLE = "write media: like - {type: cpu, limit: 256GiB}"
TUNED = ("name", *SIZE_KEYS, "store_threshold", "eviction", "write_budget", "store_rate")
"""Settings of a tier that the search chooses."""
CHOSEN = ("load_policy", "load_when", "promote")
"""And of a chain, beside its tiers."""


class BudgetMedium(BaseModel, frozen=True, extra="forbid"):
    """A tier that the chain may have. Frozen; unknown keys are refused."""

    type: str = Field(description="The tier type: cpu, disk, redis, or a plugin's.")
    limit: ByteSize = Field(description="Bytes for blocks at most.", examples=["256GiB"])
    settings: Mapping[str, Any] = Field(
        default_factory=dict,
        repr=False,
        description="Other keys of the tier, as the chain's YAML has them: path, url.",
    )

    @field_validator("type", mode="after")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        try:
            tier_class(kind)
        except (UnknownPlugin, BrokenPlugin) as error:
            raise ValueError(str(error)) from None
        return kind

    @field_validator("settings", mode="after")
    @classmethod
    def _make_a_tier(cls, settings: Mapping[str, Any], info: ValidationInfo) -> Mapping[str, Any]:
        tuned = [key for key in settings if key in ("type", *TUNED)]
        if tuned:
            raise ValueError(f"remove {tuned[0]}, which the search chooses")
        kind, limit = info.data.get("type"), info.data.get("limit")
        if kind is None or limit is None:
            return settings  # their own validators report them
        try:
            make_tier(kind, written(kind, settings, limit))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            key = ".".join(str(part) for part in first["loc"])
            do = "add it" if first["type"] == "missing" else first["msg"]
            raise ValueError(f"{key}: {do[:1].lower()}{do[1:]}") from None
        return settings

    def tier(self) -> OffloadingSpec:
        """The tier with its settings, as large as the limit."""
        return make_tier(self.type, written(self.type, self.settings, self.limit))

    @property
    def size_key(self) -> str | None:
        """The key of the tier's YAML that says its size; None: it has none."""
        return size_key(tier_class(self.type))

    @property
    def evictions(self) -> tuple[str, ...]:
        """The eviction policies that the tier has, the default first; one: no choice."""
        return tuple(SPACES) if "eviction" in tier_class(self.type).model_fields else ("lru",)

    @property
    def is_host(self) -> bool:
        """Whether its blocks stay in the host pool."""
        return issubclass(tier_class(self.type), HostSpec)


def written(kind: str, settings: Mapping[str, Any], capacity: int) -> dict[Any, Any]:
    """A tier's keys but `type`, with its size where it has a key for that."""
    key = size_key(tier_class(kind))
    return {**settings, key: capacity} if key is not None else {**settings}


class Constraints(BaseModel, frozen=True, extra="forbid"):
    """The limits of a chain. Frozen; unknown keys are refused."""

    mean_ttft: Duration | None = Field(default=None, description="Mean TTFT at most, like 800ms.")
    p99_ttft: Duration | None = Field(default=None, description="99% of TTFTs at most, like 5s.")
    price_per_month: Price | None = Field(
        default=None, description="Price of the tiers for a month at most."
    )
    life_years: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Years that each device with an endurance lasts at least.",
    )


class Budget(BaseModel, frozen=True, extra="forbid", validate_default=True):
    """Media, machine, objective and constraints. Frozen; unknown keys are refused."""

    media: tuple[BudgetMedium, ...] = Field(
        min_length=1, max_length=5, description="The tiers that the chain may have."
    )
    machine: Machine = Field(
        description="The engine and the tiers' speeds: the path of a profile, or its keys.",
        examples=["profile.json"],
    )
    objective: Objective = Field(
        default="mean_ttft",
        description="What is made as good as can be. mean_ttft, p99_ttft: low waiting times. "
        "saved_seconds: much GPU time saved. cost: a low price of tiers and busy GPUs.",
    )
    constraints: Constraints = Field(
        default=Constraints(), description="What the chain must keep within."
    )
    gpu_price_per_month: Price | None = Field(
        default=None, description="Price of a GPU for a month, for the objective cost."
    )

    @model_validator(mode="before")
    @classmethod
    def _know(cls, written: object, info: ValidationInfo) -> object:
        known = (info.context or {}).get(KNOWN, {})
        return {**known, **written} if isinstance(written, Mapping) else written

    @field_validator("machine", mode="before")
    @classmethod
    def _read(cls, machine: object, info: ValidationInfo) -> object:
        context = info.context or {}
        if not isinstance(machine, str):
            return machine
        try:
            return load_machine(context.get("folder", Path()) / machine, context.get(KNOWN))
        except SpecError as error:
            raise ValueError("; ".join(error.problems)) from None

    @field_validator("media", mode="after")
    @classmethod
    def _differ(cls, media: tuple[BudgetMedium, ...]) -> tuple[BudgetMedium, ...]:
        types = [medium.type for medium in media]
        if twice := [kind for at, kind in enumerate(types) if kind in types[:at]]:
            raise ValueError(f"there are two of type {twice[0]}; keep one of them")
        return media

    @field_validator("machine", mode="after")
    @classmethod
    def _profile_each(cls, machine: Machine, info: ValidationInfo) -> Machine:
        types = [medium.type for medium in info.data.get("media", ())]
        if missing := [kind for kind in types if kind not in machine.tiers]:
            known = one_of(sorted(machine.tiers)) if machine.tiers else "none"
            raise ValueError(f"add a profile of {missing[0]} to tiers; there is {known}")
        return machine

    @field_validator("gpu_price_per_month", mode="after")
    @classmethod
    def _of_use(cls, price: float | None, info: ValidationInfo) -> float | None:
        limits = info.data.get("constraints")
        bound = limits is not None and (limits.mean_ttft or limits.p99_ttft)
        if price is None and info.data.get("objective") == "cost" and not bound:
            raise ValueError(
                "add gpu_price_per_month, or a TTFT to constraints: else no tiers cost least"
            )
        return price

    def medium(self, kind: str) -> BudgetMedium:
        """The medium of a tier type. Raises KeyError."""
        return next(m for m in self.media if m.type == kind)


def load_budget(path: Path, known: Mapping[str, Any] | None = None) -> Budget:
    """Read a budget from a YAML file; a profile that it names lies beside it. What it leaves out
    is as in `known`, also a machine's keys and those of its tiers.

    Raises SpecError with a line for each problem: file, line, key, what was found, what would do.
    """
    return load_document(
        path, Budget, _EXAMPLE, context={"folder": path.parent, KNOWN: known or {}}
    )
