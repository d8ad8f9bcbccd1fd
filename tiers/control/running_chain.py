"""The chain that an engine runs, and facts to choose another by, as they cross the socket."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from spec.chain import ChainSpec, shown_chain
from tiers.connector.multi.multi_scheduler import MultiScheduler
from tiers.connector.scheduler.offloading_scheduler import OffloadingScheduler
from tiers.control.status_board import StatusBoard
from tiers.host.spare_memory import for_slots, spare_memory


class RunningChain(BaseModel):
    """A chain as it runs, and facts of its engine. Sizes are over all ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str = Field(description="That of kvtiers.")
    chain: dict[str, Any] = Field(description="As `kvtiers validate --json` shows it.")
    file: str | None = Field(description="From which the engine read its chain at the start.")
    host: str
    pid: int
    block_tokens: int
    kv_bytes_per_token: int | None = Field(description="None: no tier has opened.")
    cache_tokens: int = Field(description="Of the engine's own cache.")
    spare_memory_bytes: int = Field(description="What its host pool may still take.")
    store_bytes_per_second: dict[str, float] = Field(
        description="By tier, while it stores; those that stored something."
    )

    @classmethod
    def of(
        cls,
        chain: ChainSpec,
        file: Path | None,
        scheduler: MultiScheduler,
        board: StatusBoard,
        version: str,
    ) -> RunningChain:
        """Read no file but those of the system, which never hang."""
        engine = scheduler.engine
        groups = engine.kv_groups
        opened = (c.block_bytes for c in scheduler.children if isinstance(c, OffloadingScheduler))
        return cls(
            version=version,
            chain=shown_chain(chain),
            file=None if file is None else str(file),
            host=socket.gethostname(),
            pid=os.getpid(),
            block_tokens=engine.block_tokens,
            kv_bytes_per_token=max(opened, default=0) * len(groups) // engine.block_tokens or None,
            cache_tokens=engine.num_blocks // len(groups) * groups[0].tokens,
            spare_memory_bytes=for_slots(spare_memory()),
            store_bytes_per_second=board.store_rates(engine.world_size),
        )
