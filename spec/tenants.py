"""What the YAML says of tenants: requests that share a cache salt."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from spec.fields import ByteSize


class TenantSpec(BaseModel):
    """Rules for the blocks of one tenant; without any it is like all others."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tiers: tuple[str, ...] | None = Field(
        default=None,
        description="Names of the tiers that may keep its blocks; unset: all.",
    )
    quota: ByteSize | None = Field(
        default=None,
        description="Bytes in each tier at most, of what this engine stored since it started; "
        "beyond it the tenant's oldest blocks go.",
    )
