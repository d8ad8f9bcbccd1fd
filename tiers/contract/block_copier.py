"""What moves blocks between the engine's paged KV and host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch


class Copy(Protocol):
    """A copy in flight."""

    def wait(self) -> None:
        """Block until it has arrived. Raises what made it fail, IndexError or RuntimeError. Any
        thread may call it, and more than once."""


Fence = Copy
"""A place in the engine's work, at which its device arrives."""


class Gather(Copy, Protocol):
    """A copy out of paged blocks."""

    def hold_engine(self) -> None:
        """Let whatever the engine begins from now on come after its blocks were read, on its device
        if that has an order of its own. Called by the engine's thread. Raises nothing: a gather
        that failed reads nothing."""


class Ended:
    """A copy, or work of the engine, that has ended."""

    def wait(self) -> None:
        """It has."""


ENDED = Ended()


class Copier(Protocol):
    """Moves blocks between the engine's paged KV and rows of host memory (see `tiers.gpu`).

    `rows`: uint8, shape (num_slots, stride), stride >= `payload_bytes`, pinned if `pin`; owned by
    the caller, who keeps them until the copy has ended. `blocks` and `slots` have one length.
    `gather` and `fence` are called by the engine's thread, `scatter` by loader threads, at once.
    IndexError: a block or slot is out of range, and nothing was copied. RuntimeError: the device
    failed.

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

    @property
    def device(self) -> torch.device | None:
        """The device that it is pinned for; None: there is none."""

    @property
    def cpus(self) -> frozenset[int]:
        """The processors near it, for threads that touch that memory; none: all are as near."""

    def warning(self) -> str:
        """Why it copies more slowly than it should, for the operator; empty: it does not. Asked
        every step."""

    def fence(self) -> Fence:
        """Mark the work queued on the engine's device so far, for `scatter`."""

    def gather(self, blocks: Sequence[int], rows: torch.Tensor, slots: Sequence[int]) -> Gather:
        """Begin copying paged `blocks[i]` to `rows[slots[i]]`, after the work queued so far.

        Does not block. Raises IndexError, or the returned Gather's `wait` does.
        """

    def scatter(
        self, rows: torch.Tensor, slots: Sequence[int], blocks: Sequence[int], after: Fence
    ) -> Copy:
        """Begin copying `rows[slots[i]]` to paged `blocks[i]`; nothing of one that raises arrives
        later. The caller has waited for `after`, holding nothing that others need: the engine's
        work may take seconds."""

    def close(self) -> None:
        """Wait for copies in flight and release threads and streams."""


OpenCopier = Callable[[Mapping[str, torch.Tensor], int], Copier]
"""Makes a worker's copier, of its paged KV by layer name and the number of paged blocks."""
