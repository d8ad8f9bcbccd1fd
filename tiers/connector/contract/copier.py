"""What moves blocks between the engine's paged KV and host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch


class Copy(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Return when the bytes have arrived; raise what made the copy fail."""
        ...


class Copier(Protocol):
    """Moves blocks between the engine's paged KV and rows of host memory (see `tiers.gpu`).

    `payload_bytes`: bytes of one block over all layers. `layout`: text that differs whenever the
    same bytes would mean something else.
    """

    @property
    def payload_bytes(self) -> int: ...
    @property
    def layout(self) -> str: ...
    @property
    def pin(self) -> bool:
        """Whether host memory should be pinned for this device."""
        ...

    def fence(self) -> object:
        """Mark what the engine's device has been told to do so far."""
        ...

    def gather(self, blocks: Sequence[int], rows: torch.Tensor, slots: Sequence[int]) -> Copy:
        """Begin copying paged `blocks[i]` to `rows[slots[i]]`, after all work queued so far."""
        ...

    def scatter(
        self, rows: torch.Tensor, slots: Sequence[int], blocks: Sequence[int], after: object
    ) -> None:
        """Copy `rows[slots[i]]` to paged `blocks[i]` once the fence `after` has passed; blocks."""
        ...

    def close(self) -> None:
        """Wait for copies under way and release threads and streams."""
        ...


OpenCopier = Callable[[Mapping[str, torch.Tensor], int], Copier]
"""Makes a worker's copier of its paged KV, by layer, and how many blocks that has."""
