"""The disk tier's settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from spec.fields import ByteSize, FolderPath
from spec.findings import DoctorFinding
from spec.offloading import StoreContext, StoreSpec
from tiers.disk.slab import Access, Durability, Io

if TYPE_CHECKING:
    from tiers.disk.disk_store import DiskStore
    from tiers.disk.records import DiskRecords


class DiskSpec(StoreSpec):
    """A folder of this host that keeps blocks across restarts; all engines of the host share it."""

    identity: ClassVar[tuple[str, ...]] = ("path",)
    hit_source: ClassVar[str] = "disk"
    verifies: ClassVar[bool] = True
    is_prompt: ClassVar[bool] = True
    resizes: ClassVar[bool] = True

    type: Literal["disk"] = "disk"
    capacity: ByteSize = Field(
        description="Disk space for blocks, over all processes that share the path. The index "
        "takes 2 MiB and well under 1 KiB a block more."
    )
    path: FolderPath = Field(
        examples=["/var/lib/kvtiers"], description="The tier's own folder; made if it is missing."
    )
    io: Io = Field(
        default="auto",
        description="Read and write blocks through the page cache (buffered), past it (direct), or "
        "past it if the capacity is more than half of the spare memory (auto).",
    )
    durability: Durability = Field(
        default="none",
        description="What survives a crash of the machine, or of a process whose volume is then "
        "mounted anew. none: nothing, the tier starts empty. batch: all but the last seconds, or "
        "half a minute if buffered. sync: every stored block; the weakest setting "
        "of any process on the folder counts. A crash of a process alone loses nothing.",
    )

    @property
    def host_local(self) -> bool:
        return True  # each host has a folder, and an index, of its own

    @property
    def notes_folder(self) -> Path:
        return self.path / "events"

    def scratch(self, folder: Path) -> DiskSpec:
        return self.model_copy(update={"path": folder})

    def examine(self) -> Iterator[DoctorFinding]:
        from tiers.disk.examine import examine

        return examine(self.path, self.capacity, Access(self.io, self.durability))

    def open(self, site: StoreContext) -> DiskStore:
        """Open the store. Raises TierUnusable when the folder can't be used as it is, or holds less
        than one block of every share."""
        from tiers.disk.disk_store import DiskStore

        return DiskStore(self.path, self.capacity, site, Access(self.io, self.durability))

    def records(self) -> DiskRecords:
        from tiers.disk.records import DiskRecords

        return DiskRecords(self.path, Access(self.io, self.durability))
