"""A chain whose lower tier lags: its stores are under way for as long as the bench wants."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from bench.scheduler import PAYLOAD
from spec.chain import ChainSpec
from tiers.cpu.spec import CpuSpec
from tiers.host.slots import slot_stride
from tiers.store import Block
from tiers.testing import GivenSpec


@dataclass(frozen=True)
class Size:
    """`blocks` of the prompt that waits; how many stores are `in_flight`; `steps` of a figure;
    requests that `answers`."""

    blocks: int = 8192
    in_flight: tuple[int, ...] = (0, 1_000, 10_000, 50_000)
    steps: int = 200
    answers: int = 256
    ranks: tuple[int, ...] = (1, 8)
    rounds: int = 3


SMOKE = Size(blocks=64, in_flight=(0, 64), steps=3, answers=8, ranks=(2,), rounds=1)


class Names:
    """A store that keeps names, and lets `put` through when it is told to."""

    def __init__(self) -> None:
        self.names: set[bytes] = set()
        self.goes_on = threading.Event()
        self.goes_on.set()

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are kept."""
        return [key in self.names for key in keys]

    peek = has

    def touch(self, keys: Sequence[bytes]) -> None:
        """Uses are not noted."""

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """Keep the keys of blocks."""
        self.goes_on.wait()
        self.names.update(block.key for block in blocks)
        return [True] * len(blocks)

    def get(self, blocks: Sequence[Block]) -> list[bool]:
        """Nothing can be loaded: there are no bytes."""
        return [False] * len(blocks)

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget keys."""
        self.names.difference_update(keys)

    def close(self) -> None:
        """Let whoever waits go."""
        self.goes_on.set()


class LaggingSpec(GivenSpec):
    """A tier that says from memory what it holds, and detects what is damaged, as the disk does."""

    is_prompt: ClassVar[bool] = True
    verifies: ClassVar[bool] = True


def chain_of(size: Size, encrypted: Path | None) -> tuple[ChainSpec, LaggingSpec, Names]:
    """A chain of cpu over a tier that may have all of it on its way; the file of its keys."""
    store = Names()
    said: dict[str, Any] = {"name": "lagging", "max_inflight": 1 << 50, "deadline": "1h"}
    if encrypted is not None:
        said["encryption"] = {"key_file": encrypted}
    spec = LaggingSpec.model_validate({"type": "lagging", **said}).over(store)
    room = 2 * (max(size.in_flight) + size.blocks + 4096) * slot_stride(PAYLOAD) * max(size.ranks)
    chain = ChainSpec(
        version=1,
        load_when="always",
        load_policy="stitched",
        staging=room,
        tiers=(CpuSpec(capacity=room), spec),
    )
    return chain, spec, store


def worker_step(worker: Any, orders: Any) -> Any:
    """Call a worker half's members as a step of the engine does; what it says."""
    worker.bind_connector_metadata(orders)
    worker.handle_preemptions(orders)
    worker.start_load_kv(None)
    worker.wait_for_save()
    worker.get_transfer_results(set())
    said = worker.build_connector_worker_meta()
    worker.clear_connector_metadata()
    return said
