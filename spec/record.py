"""RecordSpec: where and how long the traffic of an engine is recorded."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator

from spec.fields import ByteSize, Duration, FolderPath, exact_size

MIN_BYTES = 16 << 20
"""A smaller `max` is refused: its files, a sixteenth of it each, could not hold a long prompt."""


class RecordSpec(BaseModel):
    """What of the traffic is kept, and where. The files hold no token and no text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: FolderPath = Field(
        examples=["/var/lib/kvtiers-trace"],
        description="The recording's own folder; made if it is missing. Engines may share it.",
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
