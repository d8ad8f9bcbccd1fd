"""ChainSpec: the YAML document, checked, with a name for every tier."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from spec.errors import closest, one_of
from spec.fields import (
    ByteRate,
    ByteSize,
    Duration,
    FolderPath,
    exact_size,
    mask_secrets,
    parse_size,
)
from spec.offloading import HostSpec, OffloadingSpec, StoreSpec, TierName
from spec.plugins import BrokenPlugin, UnknownPlugin
from spec.registry import make_tier, tier_types


class EventsSpec(BaseModel, frozen=True, extra="forbid"):
    """The fields of KV events. The defaults are those that most routers read."""

    self_describing_kv_events: bool = Field(
        default=True,
        description="Add the tokens of blocks, their parent and their adapter, which routers need "
        "that hash tokens themselves. false: the engine's hashes alone.",
    )
    locality: bool = Field(
        default=False,
        description="Add whether blocks are LOCAL to the host or REMOTE. Dynamo ignores all that "
        "is REMOTE.",
    )
    ownership: bool = Field(
        default=False,
        description="Add the tier's name as the owner of its blocks. Dynamo ignores all events "
        "that name one.",
    )
    folder: FolderPath | None = Field(
        default=None,
        examples=["/var/lib/kvtiers-events"],
        description="Folder of this host that keeps the announced blocks of tiers that are stores, "
        "so that they are announced again after a restart. It holds tokens. Unset: a disk tier "
        "keeps them in its own folder, other tiers do not.",
    )


class ControlSpec(BaseModel, frozen=True, extra="forbid"):
    """The socket through which `kvtiers` commands ask a running engine."""

    folder: FolderPath | None = Field(
        default=None,
        examples=["/run/kvtiers"],
        description="Folder of the engines' sockets. Only the engine's user may come in. It is "
        "made if it is not there. Unset: /run/kvtiers for root, else /tmp/kvtiers-UID.",
    )
    name: str = Field(
        default="engine",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="The engine's name for commands, to which its process number is added.",
    )


class ExplainSpec(BaseModel, frozen=True, extra="forbid"):
    """The notes kept of each request, to explain how it was served."""

    requests: int = Field(
        default=1000,
        ge=1,
        le=1_000_000,
        examples=[1000],
        description="Keep this many requests that have ended, or fewer that take 16MiB of memory.",
    )


Beside = TypeVar("Beside", EventsSpec, "RecordSpec | None", "ControlSpec | None")
"""Settings with a folder that is no tier's."""
MIN_BYTES = 16 << 20
"""A smaller `max` is refused: its files, a sixteenth of it each, could not hold a long prompt."""


class RecordSpec(BaseModel, frozen=True, extra="forbid"):
    """Which part of the traffic is kept, and where. The files hold no token and no text."""

    path: FolderPath = Field(
        examples=["/var/lib/kvtiers-trace"],
        description="The recording's own folder; made if it is missing. Engines may share it, but "
        "tune and recommend take one engine's.",
    )
    max: ByteSize = Field(
        default=1 << 30,
        description="Limit the bytes of all files, those of other engines too; the oldest files "
        "are deleted for new ones. 16MiB or more, and a sixteenth of it for each engine.",
    )
    keep: Duration = Field(
        default=7 * 86400.0, description="Delete files whose first request is older than this."
    )

    @field_validator("max", mode="after")
    @classmethod
    def _hold_long_prompts(cls, size: int) -> int:
        if size < MIN_BYTES:
            raise ValueError(f"write {exact_size(MIN_BYTES)} or more")
        return size


class TenantSpec(BaseModel, frozen=True, extra="forbid"):
    """Rules for the blocks of one tenant."""

    tiers: tuple[str, ...] | None = Field(
        default=None,
        description="Store the tenant's blocks in these tiers only, by name. Unset: in all.",
    )
    quota: ByteSize | None = Field(
        default=None,
        description="Limit the bytes that the tenant holds in each tier, counted over the blocks "
        "that this engine stored since its start. Beyond it the tenant's oldest blocks are "
        "dropped.",
    )
    name: TierName | None = Field(
        default=None,
        description="Show the tenant by this name in metrics, which never show a salt. Tenants "
        "may share a name. Unset: it counts as (other), as requests without a rule do.",
    )
    max_retained: float | None = Field(
        default=None,
        ge=0,
        le=0.9,
        description="Limit the part of each tier that hints of the tenant's requests retain. "
        "Unset: half of the chain's max_retained.",
    )


class WarmSpec(BaseModel, frozen=True, extra="forbid"):
    """What is loaded into host memory when an engine starts, before it is asked for."""

    bytes: ByteSize | None = Field(
        default=None,
        examples=["32GiB"],
        description="Limit the bytes that are loaded, over all ranks. Unset: the capacity of the "
        "first cpu tier.",
    )
    seconds: Duration = Field(
        default=60.0, description="Limit how long it takes, from the opening of the tiers on."
    )


MAX_TENANT_NAMES = 100
"""Each name is a label of metrics, of which every scrape shows all."""
MAX_GHOSTS = 4
"""More would take more than the 10 MB that ghosts may have."""
_FACTOR = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,3})?)x")


def _as_text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _size_or_factor(value: str) -> str:
    factor = _FACTOR.fullmatch(value)
    if factor is not None and float(factor[1]) > 0:
        return value
    try:
        if parse_size(value) < 1 << 20 and value.strip().isdecimal():
            raise ValueError("a number alone is bytes")
    except ValueError as error:
        raise ValueError("write a size like 64GiB, or a factor like 2x") from error
    return value


Capacity = Annotated[
    str, BeforeValidator(_as_text), AfterValidator(_size_or_factor), Field(examples=["2x", "1TiB"])
]


class GhostSpec(BaseModel, frozen=True, extra="forbid"):
    """A tier of the chain with other settings, or one that the chain does not have. It keeps no
    block, and estimates how many of the prompts' blocks the tier would have."""

    tier: str = Field(description="The name of a tier of the chain, or of one that it lacks.")
    capacity: Capacity | None = Field(
        default=None, description="Its capacity: a size, or a factor of its own, like 2x."
    )
    store_threshold: int | None = Field(
        default=None, ge=1, le=1000, description="Its store_threshold."
    )
    load_rate: ByteRate | None = Field(
        default=None, description="What a tier that the chain lacks would load, over all ranks."
    )

    @model_validator(mode="after")
    def _differ(self) -> GhostSpec:
        if self.capacity is None and self.store_threshold is None:
            raise ValueError("write capacity or store_threshold, or both")
        return self

    @property
    def label(self) -> str:
        """The tier in its metrics: `cpu (capacity: 2x)`."""
        settings = self.model_dump(include={"capacity", "store_threshold"}, exclude_none=True)
        return f"{self.tier} ({', '.join(f'{key}: {value}' for key, value in settings.items())})"

    def check(self, tier: OffloadingSpec | None, names: Sequence[str]) -> None:
        """Refuse, by ValueError, what a ghost of `tier` can't be; None: the chain has `names`."""
        if tier is not None:
            if getattr(tier, "capacity", None) is None:
                raise ValueError(f"tier {self.tier!r} has no capacity here; leave its ghosts out")
            if self.load_rate is not None:
                raise ValueError(f"what tier {self.tier!r} loads is measured; remove load_rate")
        elif self.load_rate is None:
            raise ValueError(
                f"no tier is called {self.tier!r:.80}; use {one_of(names)}, or write load_rate "
                "for one that the chain lacks"
            )
        elif self.capacity is None or _FACTOR.fullmatch(self.capacity):
            raise ValueError(f"the chain lacks tier {self.tier!r:.80}; write capacity as a size")

    def bytes_of(self, capacity: int) -> int:
        """Its capacity in bytes, if that of the tier itself is `capacity`."""
        if self.capacity is None:
            return capacity
        factor = _FACTOR.fullmatch(self.capacity)
        return int(float(factor[1]) * capacity) if factor else parse_size(self.capacity)


FORMAT_VERSION = 1
LoadPolicy = Literal["first", "longest", "stitched"]
LOAD_POLICIES: tuple[LoadPolicy, ...] = get_args(LoadPolicy)
LoadWhen = Literal["sooner", "always"]
StoreScope = Literal["all", "prompt", "computed"]
OnReset = Literal["forget", "keep"]
MAX_TIERS = 32
"""A longer chain is refused: it is a mistake, and every lookup asks every tier."""


Clash = tuple[tuple[int, str], str]
"""Two tiers that can't be in one chain: the key of the second, and the remedy."""


def _as_spec(value: object, info: ValidationInfo) -> object:
    """Make the spec of an entry of `tiers:`, whose class is chosen by its type."""
    if isinstance(value, OffloadingSpec):
        return value
    if not isinstance(value, Mapping):
        raise PydanticCustomError("dict_type", "not a mapping")
    if value.get("type") is None:
        raise _typeless(value)
    found = value["type"]
    try:
        if not isinstance(found, str):
            raise UnknownPlugin(f"use {one_of(tier_types())}")
        return make_tier(found, value, info.context)
    except (UnknownPlugin, BrokenPlugin) as error:
        problems = [_problem(("type",), str(error), found)]
        raise ValidationError.from_exception_data("tier", problems) from error


def _problem(key: tuple[int | str, ...], remedy: str, found: object) -> InitErrorDetails:
    kind = PydanticCustomError("remedy", "{remedy}", {"remedy": remedy})
    return InitErrorDetails(type=kind, loc=key, input=found)


def _typeless(value: Mapping[object, object]) -> ValidationError:
    problems = [InitErrorDetails(type="missing", loc=("type",), input=None)]
    slip = closest("type", [key for key in value if isinstance(key, str) and key != "type"])
    if slip is not None:
        problems.append(InitErrorDetails(type="extra_forbidden", loc=(slip,), input=None))
    return ValidationError.from_exception_data("tier", problems)


class ChainSpec(BaseModel, frozen=True, extra="forbid"):
    """The chain: its tiers in load priority, and how they work together.

    Every tier of a chain has a `name`: the one it was given, or its type, with -2, -3 and so on
    where another tier has that name.
    """

    version: Literal[1] = Field(description="The version of this format: 1.")
    tiers: tuple[Annotated[SerializeAsAny[OffloadingSpec], BeforeValidator(_as_spec)], ...] = Field(
        min_length=1,
        max_length=MAX_TIERS,
        description="The tiers in load priority: the first is asked first.",
    )
    load_policy: LoadPolicy = Field(
        default="stitched",
        description="Choose the tiers that load a prefix. first: the first tier that has any of "
        "it. longest: the tier that has the most of it. stitched: for each block the first tier "
        "that has this block; once tiers are measured, those that have it share a long load so "
        "that its last block comes soonest.",
    )
    load_when: LoadWhen = Field(
        default="sooner",
        description="Choose whether to load. sooner: only what comes sooner than it is computed, "
        "as measured; a tier that is slower is left out. Where eight loads left too little to "
        "compute to measure the engine by, the next requests load half. always: all that comes "
        "within max_wait.",
    )
    promote: bool = Field(
        default=True, description="Store a block that a lower tier loaded in the higher tiers too."
    )
    store: StoreScope = Field(
        default="all",
        description="What of a request is stored. all: all of it. prompt: its prompt alone, which "
        "suits answers that never come back in later prompts. computed: what this engine computes "
        "for it, and what tiers load for it (see promote); not what another connector loads, or "
        "what the engine's own cache has, which was stored where it was computed.",
    )
    max_wait: Duration = Field(
        default=10.0,
        description="Limit how long a request waits for all tiers together, for lookups and loads. "
        "Blocks that arrived in time are used, the rest is computed.",
    )
    tenants: Mapping[str, TenantSpec] = Field(
        default_factory=dict,
        repr=False,
        description="Set rules for the requests of a tenant. The key is the cache salt of these "
        "requests.",
    )
    report_cached_tokens: bool = Field(
        default=True,
        description="Report to the client in each response how many tokens of its prompt each "
        "tier loaded, as kv_transfer_params.kvtiers.cached_tokens. Left out of responses to "
        "requests with transfer parameters of another connector, and where no tier loaded any. "
        "Write false if clients without a cache salt should not know it.",
    )
    warm: WarmSpec | None = Field(
        default=None,
        description="Load what was used last of the first store that knows it (disk does) into "
        "the first cpu tier when the engine starts, beside the first requests. Unset: blocks come "
        "with the requests that load them.",
    )
    max_retained: float = Field(
        default=0.25,
        ge=0,
        le=0.9,
        description="Limit the part of each tier that hints pin. One tenant has "
        "half of it at most, or what tenants sets.",
    )
    staging: ByteSize | None = Field(
        default=None,
        description="Host memory for blocks in flight to and from stores, besides the capacity "
        "of cpu tiers. Unset: 256MiB, or the blocks of two engine steps "
        "(--max-num-batched-tokens) if all host memory of the chain is less than that.",
    )
    on_reset: OnReset = Field(
        default="forget",
        description="What a reset of the engine's caches does, as vLLM's reset_prefix_cache, "
        "sleep, pause and release of memory do one. forget: never again serve blocks stored before "
        "it. keep: serve them. Write keep only if the weights never change while the engine runs.",
    )
    trust_client_ids: bool = Field(
        default=False,
        description="Identify images, audio and video by the uuid that the client sends, and do "
        "not read their content. Write true only if no client can send one uuid for two "
        "different contents, by mistake or to deceive.",
    )
    events: EventsSpec = Field(
        default=EventsSpec(),
        description="The fields of KV events, where vLLM publishes them (--kv-events-config).",
    )
    record: RecordSpec | None = Field(
        default=None,
        description="Record when requests come and which blocks they share, to choose a better "
        "chain by. Unset: nothing is recorded.",
    )
    control: ControlSpec | None = Field(
        default=ControlSpec(),
        description="Where `kvtiers status`, `explain` and other commands reach a running engine. "
        "null: nowhere.",
    )
    explain: ExplainSpec | None = Field(
        default=None,
        description="Keep of each request why it was served as it was, for `kvtiers explain`: "
        "write explain: {}. Unset: nothing is kept.",
    )
    ghosts: tuple[GhostSpec, ...] = Field(
        default=(),
        description="Estimate what tiers would have of the traffic with other settings. Four at "
        "most; they keep no blocks.",
    )
    salt: str = Field(
        default="",
        repr=False,
        description="Separate engines: those with different salts never share blocks.",
    )

    @field_validator("events", "record", "control", mode="after")
    @classmethod
    def _lie_beside_our_tiers(cls, written: Beside, info: ValidationInfo) -> Beside:
        key = "path" if info.field_name == "record" else "folder"
        folder: Path | None = getattr(written, key, None)
        # Sockets below a tier's folder harm nothing.
        above = {folder, *(folder.parents if folder and info.field_name != "control" else ())}
        for index, tier in enumerate(info.data.get("tiers", ())):
            for field in tier.identity:
                place = getattr(tier, field)
                if isinstance(place, Path) and place in above:
                    inside = f"it is in the folder of tiers[{index}].{field}, which is that tier's "
                    remedy = f"{inside}alone; write another, as one beside that"
                    problem = _problem((key,), remedy, str(folder))
                    raise ValidationError.from_exception_data("written", [problem])
        return written

    @field_validator("tenants", mode="after")
    @classmethod
    def _name_our_tiers(
        cls, tenants: Mapping[str, TenantSpec], info: ValidationInfo
    ) -> Mapping[str, TenantSpec]:
        names = [tier.tier_name for tier in info.data.get("tiers", ())]
        for rule in tenants.values() if names else ():
            unknown = [name for name in rule.tiers or () if name not in names]
            if unknown:
                raise ValueError(f"no tier is called {unknown[0]!r:.80}; use {one_of(names)}")
        if len({None, *(rule.name for rule in tenants.values())}) > MAX_TENANT_NAMES:
            raise ValueError(f"{MAX_TENANT_NAMES - 1} names at most can be shown; remove some")
        return tenants

    @field_validator("warm", mode="after")
    @classmethod
    def _have_something_to_warm(
        cls, warm: WarmSpec | None, info: ValidationInfo
    ) -> WarmSpec | None:
        tiers = info.data.get("tiers")
        if warm is None or not tiers:
            return warm
        host = next((tier.tier_name for tier in tiers if isinstance(tier, HostSpec)), None)
        if host is None or not any(isinstance(tier, StoreSpec) for tier in tiers):
            raise ValueError("the chain needs a cpu tier, and a store like disk; add it, or remove")
        for rule in info.data.get("tenants", {}).values():
            if rule.tiers is not None and host not in rule.tiers:
                raise ValueError(
                    f"a rule of tenants keeps blocks out of {host!r}, and whose a stored block is "
                    "can't be told; remove one of both"
                )
        return warm

    @field_validator("ghosts", mode="after")
    @classmethod
    def _differ_from_our_tiers(
        cls, ghosts: tuple[GhostSpec, ...], info: ValidationInfo
    ) -> tuple[GhostSpec, ...]:
        tiers = {tier.tier_name: tier for tier in info.data.get("tiers", ())}
        for ghost in ghosts if tiers else ():
            ghost.check(tiers.get(ghost.tier), [*tiers])
        if len(ghosts) > MAX_GHOSTS:
            raise ValueError(f"keep {MAX_GHOSTS} ghosts at most")
        labels = [ghost.label for ghost in ghosts]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(f"two ghosts are {label}; remove one")
        return ghosts

    @field_validator("tiers", mode="after")
    @classmethod
    def _fit_together(cls, tiers: tuple[OffloadingSpec, ...]) -> tuple[OffloadingSpec, ...]:
        problems = [*name_clashes([tier.name for tier in tiers]), *_place_clashes(tiers)]
        if problems:
            each = [_problem(key, remedy, tiers[key[0]].type) for key, remedy in problems]
            raise ValidationError.from_exception_data(cls.__name__, each)
        names = resolve_names([(tier.type, tier.name) for tier in tiers])
        named = zip(tiers, names, strict=True)
        return tuple(tier.model_copy(update={"name": name}) for tier, name in named)


def resolve_names(tiers: Sequence[tuple[str, str | None]]) -> list[str]:
    """Return a unique name for each of `tiers`, pairs of a type and a name or None."""
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
    """Yield each tier whose name an earlier tier has; None is no name."""
    for index, name in enumerate(names):
        first = names.index(name)
        if name is not None and first < index:
            yield (index, "name"), f"tiers[{first}] has this name; give each its own"


def _place_clashes(tiers: Sequence[OffloadingSpec]) -> Iterator[Clash]:
    seen: dict[object, int] = {}
    for index, tier in enumerate(tiers):
        place = place_of(tier)
        if place and (first := seen.setdefault(place, index)) < index:
            remedy = f"in the same place; write another {' or '.join(tier.identity)}"
            yield (index, tier.identity[0]), f"tiers[{first}] keeps its blocks {remedy}"


def place_of(tier: OffloadingSpec) -> tuple[object, ...]:
    """Where a tier keeps its blocks; empty: it does not say. A value that can't be hashed, such as
    a list, is compared by its repr."""
    if not tier.identity:
        return ()
    return (tier.type, *(_hashable(getattr(tier, field)) for field in tier.identity))


def _hashable(value: object) -> object:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def shown_chain(chain: ChainSpec) -> dict[str, Any]:
    """The chain with its defaults, as it is written, but without secrets, nobody's salt among them:
    what anyone may see."""
    dumped = chain.model_dump(mode="json", exclude_none=True)
    dumped["salt"] = "***" if chain.salt else "none"
    # Cache salts keep tenants apart: whoever knows one can ask for that tenant's blocks.
    dumped["tenants"] = len(chain.tenants) or "none"
    shown: dict[str, Any] = _masked(dumped)  # a plugin's settings may show some
    return shown


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _masked(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_masked(item) for item in value]
    return mask_secrets(value) if isinstance(value, str) else value
