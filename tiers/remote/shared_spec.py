"""The shared tier's settings: packs of blocks in a directory that hosts share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from spec.fields import ByteSize, FolderPath
from spec.findings import DoctorFinding
from spec.offloading import StoreContext, StoreSpec

if TYPE_CHECKING:
    from tiers.remote.packs.bucket import BucketMarks
    from tiers.remote.packs.pack_store import PackStore


class SharedSpec(StoreSpec):
    """A directory that several hosts share: NFS, Lustre, CephFS, or a volume of Kubernetes."""

    identity: ClassVar[tuple[str, ...]] = ("path",)
    verifies: ClassVar[bool] = True

    type: Literal["shared"] = "shared"
    path: FolderPath = Field(
        examples=["/mnt/kv/llama"],
        description="The tier's own directory, below the mount. It must be there: make it once, so "
        "that what is not mounted is not taken for empty. Mount an NFS with lookupcache=positive.",
    )
    capacity: ByteSize | None = Field(
        default=None,
        description="Space for blocks, over all hosts: one process evicts what was used least "
        "recently, in rounds of ten seconds or longer. Write the same for each engine. Unset: "
        "nothing is evicted.",
    )
    threads: int = Field(
        default=16,
        ge=1,
        le=256,
        description="Files read or written at once, by each process of the engine.",
    )

    @property
    def host_local(self) -> bool:
        return False

    def scratch(self, folder: Path) -> SharedSpec:
        """The same in a folder of this host: how fast the directory is, it does not show."""
        return self.model_copy(update={"path": folder})

    def examine(self) -> Iterator[DoctorFinding]:
        from tiers.remote.shared.examine import examine

        return examine(self.path, self.capacity)

    def marks(self) -> BucketMarks:
        from tiers.remote.packs.bucket import BucketMarks
        from tiers.remote.shared.directory_bucket import DirectoryBucket

        return BucketMarks(DirectoryBucket(self.path))

    def open(self, site: StoreContext) -> PackStore:
        """Open the store. Raises TierNotOpen where the directory is missing, TierUnusable where it
        can't be used as it is, or may hold less than one block of each process."""
        from tiers.remote.packs.evictor import require_room
        from tiers.remote.packs.pack_store import PackStore
        from tiers.remote.shared.directory_bucket import kept_directory

        require_room(str(self.path), self.capacity, site)
        bucket = kept_directory(self.path, self.capacity)
        return PackStore(
            bucket, site.payload_bytes, timeout=self.deadline, connections=self.threads
        )
