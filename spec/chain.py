"""ChainSpec: the YAML document, checked and with every tier named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from spec.fields import ByteSize, Duration
from spec.hints import closest, one_of
from spec.offloading import OffloadingSpec
from spec.registry import BrokenTierType, UnknownTierType, make_tier, tier_types
from spec.tenants import TenantSpec

FORMAT_VERSION = 1
LoadPolicy = Literal["first", "longest", "stitched", "cheapest"]
OnReset = Literal["forget", "keep"]
MAX_TIERS = 32
"""A chain longer than this is a mistake, and every lookup would walk it."""


class Clash(NamedTuple):
    """Two tiers that can't be in one chain; `loc` is the key of the second."""

    loc: tuple[int, str]
    remedy: str


def _as_spec(value: object) -> object:
    """Make the settings that an entry of `tiers:` has by its type."""
    if isinstance(value, OffloadingSpec):
        return value
    if not isinstance(value, Mapping):
        raise PydanticCustomError("dict_type", "not a mapping")
    if value.get("type") is None:
        raise _typeless(value)
    found = value["type"]
    try:
        if not isinstance(found, str):
            raise UnknownTierType(f"use {one_of(tier_types())}")
        return make_tier(found, value)
    except (UnknownTierType, BrokenTierType) as error:
        reason = PydanticCustomError("tier_type", "{reason}", {"reason": str(error)})
        problem = InitErrorDetails(type=reason, loc=("type",), input=found)
        raise ValidationError.from_exception_data("tier", [problem]) from error


def _typeless(value: Mapping[object, object]) -> ValidationError:
    problems = [InitErrorDetails(type="missing", loc=("type",), input=None)]
    slip = closest("type", [key for key in value if isinstance(key, str) and key != "type"])
    if slip is not None:
        problems.append(InitErrorDetails(type="extra_forbidden", loc=(slip,), input=None))
    return ValidationError.from_exception_data("tier", problems)


class CheapestSpec(BaseModel):
    """How the load policy `cheapest` weighs loading against computing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_tokens: int = Field(
        default=64,
        ge=1,
        examples=[64],
        description="Prefixes shorter than this are computed, not loaded.",
    )
    margin: float = Field(
        default=0.05,
        ge=0,
        le=10,
        description="By how much loading must be faster than computing the same tokens: 0.05 is "
        "five percent.",
    )


class ChainSpec(BaseModel):
    """The chain: its tiers in load priority, and how they work together.

    In a chain that is made, every tier has its `name`: its own, or else its type, with -2 and so
    on where that is taken.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = Field(description="Version of this format: 1.")
    tiers: tuple[Annotated[SerializeAsAny[OffloadingSpec], BeforeValidator(_as_spec)], ...] = Field(
        min_length=1, max_length=MAX_TIERS, description="Load priority: the first is tried first."
    )
    load_policy: LoadPolicy = Field(
        default="first",
        description="Which tier serves a prefix: the first, in order, that has any of it; the one "
        "that has the longest; stitched, for each block the first that has that block; or "
        "cheapest, the one that is measured to bring the request soonest to the end of its prompt, "
        "if that is sooner than computing it.",
    )
    cheapest: CheapestSpec | None = Field(
        default=None,
        validate_default=True,
        description="Settings of the load policy cheapest; only with it.",
    )
    promote: bool = Field(
        default=True, description="Keep blocks that a lower tier served in the higher ones too."
    )
    store: Literal["all", "prompt"] = Field(
        default="all",
        description="What of a request is stored: all of it, or its prompt alone, where answers do "
        "not come back in later prompts.",
    )
    max_wait: Duration = Field(
        default=10.0,
        description="How long a request may wait for all tiers together, lookups and loads; what "
        "has arrived by then is used, the rest computed.",
    )
    tenants: Mapping[str, TenantSpec] = Field(
        default_factory=dict,
        repr=False,
        description="Rules for requests by their cache salt, which is the key here.",
    )
    staging: ByteSize | None = Field(
        default=None,
        description="Host memory for blocks on their way, besides that of the cpu tiers. Unset: "
        "256MiB, or more where all blocks of two of the engine's steps would not fit.",
    )
    on_reset: OnReset = Field(
        default="forget",
        description="What a reset of the engine's caches does here, such as vLLM's with sleep, "
        "pause and release of memory: forget, and never again serve what was stored before; or "
        "keep all of it. Write keep only if the weights never change while the engine runs.",
    )
    trust_client_ids: bool = Field(
        default=False,
        description="Take the uuids that clients give images, audio and video for their content: "
        "only if no client would give two different ones the same, by mistake or to deceive.",
    )
    salt: str = Field(
        default="", description="Engines with different salts never share blocks.", repr=False
    )

    @field_validator("cheapest", mode="after")
    @classmethod
    def _go_with_load(
        cls, cheapest: CheapestSpec | None, info: ValidationInfo
    ) -> CheapestSpec | None:
        policy = info.data.get("load_policy")
        if cheapest is not None and policy not in ("cheapest", None):
            raise ValueError("write load_policy: cheapest, or remove this")
        return CheapestSpec() if cheapest is None and policy == "cheapest" else cheapest

    @field_validator("tenants", mode="after")
    @classmethod
    def _name_our_tiers(
        cls, tenants: Mapping[str, TenantSpec], info: ValidationInfo
    ) -> Mapping[str, TenantSpec]:
        names = [tier.tier_name for tier in info.data.get("tiers", ())]
        for rule in tenants.values() if names else ():
            unknown = [name for name in rule.tiers or () if name not in names]
            if unknown:
                raise ValueError(f"no tier is called {unknown[0]!r}; use {one_of(names)}")
        return tenants

    @field_validator("tiers", mode="after")
    @classmethod
    def _fit_together(cls, tiers: tuple[OffloadingSpec, ...]) -> tuple[OffloadingSpec, ...]:
        problems = [*name_clashes([tier.name for tier in tiers]), *_place_clashes(tiers)]
        if problems:
            raise ValidationError.from_exception_data(
                cls.__name__,
                [
                    InitErrorDetails(
                        type=PydanticCustomError("clash", "{remedy}", {"remedy": clash.remedy}),
                        loc=clash.loc,
                        input=tiers[clash.loc[0]].type,
                    )
                    for clash in problems
                ],
            )
        names = resolve_names([(tier.type, tier.name) for tier in tiers])
        named = zip(tiers, names, strict=True)
        return tuple(tier.model_copy(update={"name": name}) for tier, name in named)


def resolve_names(tiers: Sequence[tuple[str, str | None]]) -> list[str]:
    """Names for tiers of which each gives its type and, perhaps, a name of its own."""
    taken = {name for _, name in tiers if name is not None}
    names = []
    for tier_type, name in tiers:
        if name is None:
            name, number = tier_type, 1
            while name in taken:
                number += 1
                name = f"{tier_type}-{number}"
            taken.add(name)
        names.append(name)
    return names


def name_clashes(names: Sequence[object]) -> Iterator[Clash]:
    """Tiers with a name that an earlier one was given; None is no name."""
    for index, name in enumerate(names):
        first = names.index(name)
        if name is not None and first < index:
            yield Clash((index, "name"), f"tiers[{first}] has this name; give each its own")


def _place_clashes(tiers: Sequence[OffloadingSpec]) -> Iterator[Clash]:
    seen: dict[object, int] = {}
    for index, tier in enumerate(tiers):
        if not tier.identity:
            continue
        # A value that can't be hashed, a list say, is compared as it is written.
        place = (tier.type, *(_hashable(getattr(tier, field)) for field in tier.identity))
        first = seen.setdefault(place, index)
        if first < index:
            fields = " or ".join(tier.identity)
            yield Clash(
                (index, tier.identity[0]),
                f"tiers[{first}] keeps its blocks in the same place; write another {fields}",
            )


def _hashable(value: object) -> object:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value
