"""Access: how the operator wants a folder to be read and written."""

from __future__ import annotations

from typing import Literal, NamedTuple

Io = Literal["auto", "direct", "buffered"]
Durability = Literal["none", "batch", "sync"]


class Access(NamedTuple):
    """How a folder is used, as the operator wrote it."""

    io: Io = "auto"
    durability: Durability = "none"

    @property
    def synced(self) -> bool:
        """Whether each commit of the index reaches the device before the next one does."""
        return self.durability != "none"


DEFAULT_ACCESS = Access()
