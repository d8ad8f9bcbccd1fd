"""The remote tier's settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from spec.fields import Duration
from spec.offloading import StoreSite, StoreSpec
from tiers.remote.url import RedisUrlField

if TYPE_CHECKING:
    from tiers.remote.store import RedisStore


class RedisSpec(StoreSpec):
    """A Redis or Valkey server shared by replicas."""

    identity: ClassVar[tuple[str, ...]] = ("url", "key_prefix")

    type: Literal["redis"] = "redis"
    url: RedisUrlField = Field(
        description="redis://host:port/db, unix:///path, redis+cluster://host:port,..., or "
        "redis+sentinel://host:port,.../service/db."
    )
    ttl: Duration | None = Field(
        default=None,
        description="How long a block is kept after it was last stored; unset: until the server "
        "evicts it.",
    )
    timeout: Duration = Field(
        default=1.0,
        description="Limit for connecting, and for each question to the server; moving blocks has "
        "a second more for every 32 MiB.",
    )
    key_prefix: Annotated[str, Field(pattern=r"^[!-~]+$", max_length=128)] = Field(
        default="kvtiers", description="Start of every key, before a colon."
    )
    codec: Literal["none", "zstd", "planes", "auto"] = Field(
        default="none",
        description="Compression of what is stored, without loss: planes suits bfloat16 and "
        "float16, auto takes it where it pays. For links slower than some 700 MB/s.",
    )

    def open(self, site: StoreSite) -> RedisStore:
        """Open the store. Never connects: the server may come up later.

        Raises TierUnusable when a block is larger than a Redis value can be.
        """
        from tiers.remote.store import RedisStore

        return RedisStore(self, site.payload_bytes)
