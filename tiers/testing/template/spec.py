"""The settings: the keys of the tier in the YAML, and how its store is opened."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from spec.fields import ByteSize, FolderPath
from spec.offloading import StoreContext, StoreSpec
from tiers.errors import TierNotOpen
from tiers.testing.template.store import TemplateStore


class TemplateSpec(StoreSpec):
    """Blocks in an SQLite file of this host."""

    identity: ClassVar[tuple[str, ...]] = ("path",)  # two tiers of a chain lie in two folders
    hit_source: ClassVar[str] = "disk"
    resizes: ClassVar[bool] = True

    type: Literal["template"] = "template"
    path: FolderPath = Field(description="The folder of the file, which is there already.")
    capacity: ByteSize = Field(description="The bytes of all blocks, of all engines on the folder.")

    @property
    def host_local(self) -> bool:
        return True  # other hosts have other folders

    def open(self, site: StoreContext) -> TemplateStore:
        if not self.path.is_dir():
            raise TierNotOpen(f"{self.path} is not there")  # it is tried again
        return TemplateStore(self.path / "blocks.sqlite", self.capacity, self.deadline / 2)

    def scratch(self, folder: Path) -> TemplateSpec:
        return self.model_copy(update={"path": folder})
