"""EventsSpec: what KV events say, for the routers that read them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class EventsSpec(BaseModel):
    """What KV events say of a tier's blocks. The defaults are what the most routers read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    self_describing_kv_events: bool = Field(
        default=True,
        description="Tell the tokens of blocks, their parent and their adapter, which routers need "
        "that hash tokens themselves. false: tell the engine's hashes alone.",
    )
    locality: bool = Field(
        default=False,
        description="Tell whether blocks are LOCAL to the host or REMOTE. Dynamo ignores all that "
        "is REMOTE.",
    )
    ownership: bool = Field(
        default=False,
        description="Tell the tier's name as the owner of its blocks. Dynamo ignores all events "
        "that name one.",
    )
