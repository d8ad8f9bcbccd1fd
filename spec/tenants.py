"""TenantSpec: rules for a tenant, which is all requests with the same cache salt."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from spec.fields import ByteSize


class TenantSpec(BaseModel):
    """Rules for the blocks of one tenant."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
    max_retained: float | None = Field(
        default=None,
        ge=0,
        le=0.9,
        description="Limit the part of each tier that hints of the tenant's requests retain. "
        "Unset: half of the chain's max_retained.",
    )
