"""OffloadingSpec: one tier's settings, frozen, that also open the tier. The plugin base.

A plugin subclasses `StoreSpec` (its tier is a store of blocks), or `HostSpec` (its tier keeps
blocks in the engine's own host pool), and ships the class as an entry point of the group
`kvtiers.tiers`; the entry point's name is the tier's `type` in the YAML.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from spec.encryption import EncryptionSpec
from spec.fields import ByteRate, ByteSize, Duration

if TYPE_CHECKING:  # for annotations only: the specs know no tier at run time
    from tiers.host.slots import Residency, Slots
    from tiers.store import TierStore

HIT_SOURCES = ("device", "host", "p2p", "disk", "external_unspecified")
"""What an engine can call tokens that come from a tier: all the values that vLLM has for it."""

TierName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]


@dataclass(frozen=True)
class StoreContext:
    """What a store is told of the engine when it is opened.

    `payload_bytes`: length of every block's payload, in bytes.
    `num_ranks`: how many processes of this engine (ranks) hold a part of the tier each.
    """

    payload_bytes: int
    num_ranks: int = 1


class OffloadingSpec(BaseModel):
    """One entry of `tiers:`; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    identity: ClassVar[tuple[str, ...]] = ()
    """Fields that together say where the tier keeps its blocks: two tiers of one type in a chain
    must differ in them. Empty: any number may be alike."""

    hit_source: ClassVar[str] = "external_unspecified"
    """What the engine calls tokens that come from such a tier: one of `HIT_SOURCES`."""

    type: str = Field(description="Tier type: the name of a kvtiers.tiers entry point.")
    name: TierName | None = Field(
        default=None, description="Unique name in metrics and logs; defaults to the type."
    )
    store_threshold: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="Store a block when the so many-th request has it: 2 keeps out what is asked "
        "for only once.",
    )

    @property
    def tier_name(self) -> str:
        """The name the tier goes by; a chain makes it unique."""
        return self.name or self.type


class StoreSpec(OffloadingSpec):
    """A tier that is a store: disk, remote, most plugins.

    Rates and the queue are those of one engine, over all its ranks.
    """

    verifies: ClassVar[bool] = False
    """Whether the store itself finds a block that is not, byte for byte, what was put under its
    key. Where it does not, it is given our own records instead of bare payloads."""

    is_prompt: ClassVar[bool] = False
    """Whether `peek` and `touch` of the store never wait, so that the engine's own thread may call
    them. A store that says so and hangs there stops the engine; others are asked in the
    background, by `has`."""

    @property
    def host_local(self) -> bool | None:
        """Whether its blocks are found on the host alone that stored them, as those of a folder or
        of a server at localhost are. An engine on several hosts goes on without such a tier, which
        would store all and find nothing. None: judged by the store, which is taken for local if it
        answers from memory (`is_prompt`) or has the capability `Clear`."""
        return None

    deadline: Duration = Field(
        default=10.0,
        description="A read or write that takes longer counts as failed, and the tier is left "
        "alone until it works again.",
    )
    max_inflight: ByteSize | None = Field(
        default=None,
        description="Bytes on their way into the tier at most; blocks beyond it are not stored. "
        "Unset: half of the host memory of the chain.",
    )
    encryption: EncryptionSpec | None = Field(
        default=None, description="Encrypt blocks, and hide their names, with keys of ours."
    )
    store_rate: ByteRate | None = Field(
        default=None, description="Bytes stored a second at most, like 200MB/s."
    )
    load_rate: ByteRate | None = Field(
        default=None, description="Bytes loaded a second at most, like 1GB/s."
    )
    write_budget: ByteRate | None = Field(
        default=None,
        description="Bytes stored in the long run at most, like 2TB/day, to spare an SSD; up to an "
        "hour's worth may come at once.",
    )

    @field_validator("codec", mode="after", check_fields=False)
    @classmethod
    def _suit_encryption(cls, codec: str, info: ValidationInfo) -> str:
        if codec != "none" and info.data.get("encryption") is not None:
            raise ValueError("write none: encrypted blocks can't be made smaller")
        return codec

    @abstractmethod
    def open(self, site: StoreContext) -> TierStore:
        """Open the store: in the scheduler's process, and in each worker's; both may be one, or
        fork later. Called on a thread of its own, and again after TierNotOpen. Owner: the caller,
        who closes it.

        Raises `tiers.errors.TierUnusable` when it can't work as configured, `TierNotOpen` when it
        can't for now: it is tried again. Anything else but OSError counts as the first. A server
        that is down is no such case: the store is returned and its verbs raise until it comes up.
        """


class HostSpec(OffloadingSpec):
    """A tier whose blocks stay in the host pool of the engine's workers."""

    hit_source: ClassVar[str] = "host"

    is_trusted: ClassVar[bool] = False
    """Whether the bookkeeping is used as it is. What goes wrong in another's ends that tier alone;
    in one that says so, the engine."""

    capacity: ByteSize = Field(description="Host memory for this tier, over all ranks.")
    verify: Literal["never", "always"] = Field(
        default="never",
        description="Whether a block in host memory is checked against its checksum before it is "
        "loaded. What other tiers hold always is.",
    )

    @abstractmethod
    def residency(self, pool: Slots, max_slots: int) -> Residency:
        """Make the bookkeeping of which blocks stay in the pool (both in `tiers/host/slots.py`).

        `max_slots` of the pool's slots at most. Called once, on the engine's scheduler thread, as
        all of the result's methods are: none may wait. `pool` lives as long as the engine.
        """
