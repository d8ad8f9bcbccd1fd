"""OffloadingSpec: one tier's settings, frozen, that also open the tier. The plugin base.

A plugin subclasses `StoreSpec` (its tier is a store of blocks), or `HostSpec` (its tier keeps
blocks in the engine's own host pool), and ships the class as an entry point of the group
`kvtiers.tiers`; the entry point's name is the tier's `type` in the YAML.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from spec.fields import ByteSize

if TYPE_CHECKING:  # for annotations only: the specs know no tier at run time
    from tiers.pool import Residency, SlotPool
    from tiers.store import TierStore

TierName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]


@dataclass(frozen=True)
class StoreSite:
    """What a store is told of the engine when it is opened.

    `payload_bytes`: length of every block's payload, in bytes.
    `shares`: how many processes of this engine (ranks) hold a part of the tier each.
    """

    payload_bytes: int
    shares: int = 1


class OffloadingSpec(BaseModel):
    """One entry of `tiers:`; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    identity: ClassVar[tuple[str, ...]] = ()
    """Fields that together say where the tier keeps its blocks: two tiers of one type in a chain
    must differ in them. Empty: any number may be alike."""

    hit_source: ClassVar[str] = "external_unspecified"
    """What the engine calls tokens that come from such a tier."""

    type: str = Field(description="Tier type: the name of a kvtiers.tiers entry point.")
    name: TierName | None = Field(
        default=None, description="Unique name in metrics and logs; defaults to the type."
    )

    @property
    def tier_name(self) -> str:
        """The name the tier goes by; a chain makes it unique."""
        return self.name or self.type


class StoreSpec(OffloadingSpec):
    """A tier that is a store: disk, remote, most plugins."""

    @abstractmethod
    def open(self, site: StoreSite) -> TierStore:
        """Open the store; called once per process and side. Owner: the caller, who closes it.

        Raises `tiers.errors.TierUnusable` when it can't work as configured. A server that is
        down is no such case: the store is returned and its verbs raise until it comes up.
        """


class HostSpec(OffloadingSpec):
    """A tier whose blocks stay in the host pool of the engine's workers."""

    hit_source: ClassVar[str] = "host"

    capacity: ByteSize = Field(description="Host memory for this tier, over all ranks.")

    @abstractmethod
    def residency(self, pool: SlotPool, max_slots: int) -> Residency:
        """Make the bookkeeping of which blocks stay in the pool; `max_slots` at most."""
