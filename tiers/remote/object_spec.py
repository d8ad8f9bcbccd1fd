"""The object tier's settings: packs of blocks in a bucket of an object store."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from spec.fields import ByteSize, Duration, mask_secrets
from spec.findings import DoctorFinding
from spec.offloading import StoreContext, StoreSpec
from spec.secret import SecretField

if TYPE_CHECKING:
    from tiers.remote.object.obstore_bucket import ObstoreBucket
    from tiers.remote.packs.bucket import Bucket, BucketMarks
    from tiers.remote.packs.pack_store import PackStore

WHAT_WORKS = "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///path"
_SECRET = re.compile(r"secret|token|password|key|sas|signature|credential", re.IGNORECASE)
_NOT_SECRET = re.compile(r"^(aws_)?(access_key_id|sse_kms_key_id)$", re.IGNORECASE)


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    path = parts.path.strip("/")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("write no login and no query in the URL; logins are in secrets")
    if parts.scheme == "file":
        if parts.netloc or not path:
            raise ValueError("write the folder's whole path, like file:///mnt/kv")
    elif parts.scheme not in ("s3", "gs", "az") or not parts.netloc:
        raise ValueError(f"what works is {WHAT_WORKS}")
    if not all(re.fullmatch(r"[\w.-]+", part, re.ASCII) for part in path.split("/") if path):
        raise ValueError("use letters, digits, and . _ - in the path")
    return url


class ObjectSpec(StoreSpec):
    """A bucket of an object store that several engines share: S3, GCS, Azure, or a folder."""

    identity: ClassVar[tuple[str, ...]] = ("url", "endpoint")
    verifies: ClassVar[bool] = True

    type: Literal["object"] = "object"
    url: Annotated[str, AfterValidator(_checked)] = Field(
        description=f"The bucket, and what its names begin with: {WHAT_WORKS}.",
        examples=["s3://kv-cache/llama"],
    )
    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s@?#]+$")] | None = Field(
        default=None,
        description="The server, where it is not the cloud's own, like http://10.0.0.5:8333.",
    )
    region: Annotated[str, Field(pattern=r"^[\w-]+$")] | None = Field(
        default=None, description="The region of an S3 bucket."
    )
    options: Mapping[str, str] = Field(
        default_factory=dict,
        description="More settings of the client, by obstore's names, like {account_name: kv}. "
        "None of them may be a secret.",
    )
    secrets: Mapping[str, SecretField] = Field(
        default_factory=dict,
        description="Where to read credentials, by obstore's names, like {access_key_id: {env: "
        "KEY_ID}, secret_access_key: {file: /run/secrets/s3}}. A file is read again when the "
        "server refuses what was read. Unset: the machine's own, as the cloud's tools find them.",
    )
    capacity: ByteSize | None = Field(
        default=None,
        description="Space for blocks, over all engines: one process evicts what was stored first, "
        "in rounds of a minute or longer, ten seconds when it is full. Write the same for each "
        "engine. Unset: nothing is evicted; let the bucket delete by age.",
    )
    timeout: Duration = Field(
        default=5.0,
        description="Limit for one request, with its retries. A transfer has one second more for "
        "every 32 MiB.",
    )
    connections: int = Field(
        default=32, ge=1, le=256, description="Requests at once, of each process of the engine."
    )

    @field_validator("endpoint", "region", "options", "secrets", mode="after")
    @classmethod
    def _not_of_a_folder(cls, value: Any, info: ValidationInfo) -> Any:
        if value and str(info.data.get("url")).startswith("file:"):
            raise ValueError("remove it: the url is a folder, which has none")
        return value

    @field_validator("options", mode="after")
    @classmethod
    def _no_secret(cls, options: Mapping[str, str], info: ValidationInfo) -> Mapping[str, str]:
        for name, value in options.items():
            is_secret = _SECRET.search(name) and not _NOT_SECRET.search(name)
            is_url = re.search(r"[:?]\S", value)  # else an @ is that of an address of mail
            if is_secret or (is_url and mask_secrets(value) != value):
                raise ValueError(f"move {name} to secrets, like {{{name}: {{env: NAME}}}}")
        return options

    @property
    def host_local(self) -> bool | None:
        # A folder may be shared by hosts, and may not.
        return False if not self.url.startswith("file:") else None

    def scratch(self, folder: Path) -> ObjectSpec:
        """The same in a folder of this host: how fast the bucket is, it does not show."""
        none: dict[str, Any] = {"endpoint": None, "region": None, "options": {}, "secrets": {}}
        return self.model_copy(update={"url": f"file://{folder}", **none})

    def examine(self) -> Iterator[DoctorFinding]:
        from tiers.remote.object.examine import examine
        from tiers.remote.packs.pack import PACK_BYTES

        bucket = self._bucket(PACK_BYTES)
        with closing(self._over(bucket, PACK_BYTES)) as store:
            yield from examine(store, bucket, self.capacity)

    def open(self, site: StoreContext) -> PackStore:
        """Open the store, without connecting. Raises TierUnusable where obstore is missing or
        refuses a setting, a credential can't be read, or it may hold less than one block of each
        process."""
        bucket = self._bucket(site.payload_bytes)
        if self.capacity is None:
            return self._over(bucket, site.payload_bytes)
        from tiers.remote.object.upkeep import PACE, ObjectTerms
        from tiers.remote.packs.evictor import KeptBucket, require_room

        require_room(self.url, self.capacity, site)
        kept = KeptBucket(bucket, self.capacity, ObjectTerms(bucket), PACE)
        return self._over(kept, site.payload_bytes)

    def marks(self) -> BucketMarks:
        from tiers.remote.packs.bucket import BucketMarks

        return BucketMarks(self._bucket(0))

    def _over(self, bucket: Bucket, payload_bytes: int) -> PackStore:
        from tiers.remote.packs.pack_store import PackStore

        return PackStore(bucket, payload_bytes, timeout=self.timeout, connections=self.connections)

    def _bucket(self, payload_bytes: int) -> ObstoreBucket:
        from tiers.errors import TierUnusable

        try:
            from tiers.remote.object.obstore_bucket import ObstoreBucket, open_client
        except ModuleNotFoundError as error:
            raise TierUnusable(f"it needs {error.name}: install kvtiers[object]") from error
        from tiers.remote.deadline import SLOWEST
        from tiers.remote.packs.pack import PACK_BYTES

        parts = urlsplit(self.url)
        named = {"endpoint": self.endpoint, "region": self.region}
        config = {**self.options, **{name: value for name, value in named.items() if value}}
        transfer = self.timeout + max(payload_bytes, PACK_BYTES) / SLOWEST
        make = partial(open_client, self.url, config, self.secrets, self.timeout, transfer)
        prefix = "" if parts.scheme == "file" else parts.path
        return ObstoreBucket(make, self.url, prefix, self.timeout)
