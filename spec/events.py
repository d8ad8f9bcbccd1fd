"""EventsSpec: what KV events say, for the routers that read them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from spec.fields import FolderPath


class EventsSpec(BaseModel):
    """What KV events say of a tier's blocks. The defaults are what the most routers read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
        description="Folder of this host that keeps what was announced of tiers that are stores, "
        "so that it is announced again after a restart. It holds tokens. Unset: a disk tier keeps "
        "it in its own folder, other tiers do not.",
    )
    announce_rate: float = Field(
        default=20_000.0,
        ge=1,
        le=1e9,
        examples=[20000],
        description="Announce again this many blocks a second at most after a restart.",
    )
