"""GhostSpec: other settings of a tier, whose hits are estimated."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from spec.fields import parse_size

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


class GhostSpec(BaseModel):
    """A tier of the chain with other settings. It keeps no block, and estimates how many of the
    prompts' blocks the tier would have."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tier: str = Field(description="The name of a tier of the chain.")
    capacity: Capacity | None = Field(
        default=None, description="Its capacity: a size, or a factor of what it has, like 2x."
    )
    store_threshold: int | None = Field(
        default=None, ge=1, le=1000, description="Its store_threshold."
    )

    @model_validator(mode="after")
    def _differ(self) -> GhostSpec:
        if self.capacity is None and self.store_threshold is None:
            raise ValueError("write capacity or store_threshold, or both")
        return self

    @property
    def label(self) -> str:
        """What its metrics have as tier: `cpu (capacity: 2x)`."""
        settings = self.model_dump(exclude={"tier"}, exclude_none=True)
        return f"{self.tier} ({', '.join(f'{key}: {value}' for key, value in settings.items())})"

    def bytes_of(self, capacity: int) -> int:
        """Its capacity in bytes, if that of the tier itself is `capacity`."""
        if self.capacity is None:
            return capacity
        factor = _FACTOR.fullmatch(self.capacity)
        return int(float(factor[1]) * capacity) if factor else parse_size(self.capacity)
