"""Control: what an engine answers on its socket, opened beside its start."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from spec.chain import ChainSpec, ControlSpec, shown_chain
from tiers.concurrency.executors import close_result, in_background
from tiers.connector.multi.multi_scheduler import MultiScheduler
from tiers.connector.scheduler.offloading_scheduler import OffloadingScheduler
from tiers.contract.block_groups import BlockGroups
from tiers.control.change_verbs import ChangeVerbs
from tiers.control.control_server import (
    ControlServer,
    FolderRefused,
    QuestionRefused,
    Verb,
    runtime_folder,
)
from tiers.control.engine_status import RunningChain
from tiers.control.status_board import StatusBoard
from tiers.explain.explanations import answer
from tiers.host.spare_memory import for_slots, spare_memory

logger = logging.getLogger(__name__)
_NO_SOCKET = "`kvtiers status` finds nothing: no socket in control.folder: %s"


class Control:
    """A chain's socket. A thread opens it, since its folder may hang; a folder that can't be used
    is one line in the log, and the engine serves without."""

    def __init__(
        self, chain: ChainSpec, scheduler: MultiScheduler, file: Path | None = None
    ) -> None:
        """`file`: the chain's, if it was read from one."""
        self._file = file
        self._scheduler = scheduler
        self._opening: Future[ControlServer | None] | None = None
        assert scheduler.changes is not None, "it has a chain"
        self._live = scheduler.changes
        self.board = StatusBoard(scheduler)
        self._changes = ChangeVerbs(self._live, self.board.saved)
        if chain.control is not None:
            try:
                self._opening = in_background(partial(self._open, chain.control), "control-open")
            except RuntimeError as error:
                logger.warning(_NO_SOCKET, error)

    def _open(self, spec: ControlSpec) -> ControlServer | None:
        folder = spec.folder or runtime_folder()
        verbs: dict[str, Verb] = {
            "status": self._status,
            "explain": self._explain,
            "apply": self._changes.apply,
            "pause": self._changes.pause,
            "change": self._changes.change,
            "chain": self._running,
        }
        try:
            server = ControlServer(folder, spec.name, verbs)
        except (FolderRefused, OSError, RuntimeError) as error:
            logger.warning(_NO_SOCKET, error)
            return None
        logger.info("`kvtiers status` shows this engine as %s, in %s", server.engine, folder)
        return server

    def _status(self, parameters: Mapping[str, Any]) -> Any:
        if parameters:
            raise QuestionRefused("status takes no parameters")
        return self.board.status(version("kvtiers")).model_dump(mode="json")

    def _running(self, parameters: Mapping[str, Any]) -> Any:
        if parameters:
            raise QuestionRefused("chain takes no parameters")
        # No file is read but those of the system, which never hang.
        scheduler, engine = self._scheduler, self._scheduler.engine
        parts = BlockGroups(engine).parts_kept
        opened = (c.block_bytes for c in scheduler.children if isinstance(c, OffloadingScheduler))
        return RunningChain(
            version=version("kvtiers"),
            chain=shown_chain(self._live.chain),
            file=None if self._file is None else str(self._file),
            host=socket.gethostname(),
            pid=os.getpid(),
            block_tokens=engine.block_tokens,
            kv_bytes_per_token=max(opened, default=0) * parts // engine.block_tokens or None,
            cache_tokens=engine.num_blocks // parts * engine.block_tokens,
            spare_memory_bytes=for_slots(spare_memory()),
            store_bytes_per_second=self.board.store_rates(engine.world_size),
        ).model_dump(mode="json")

    def _explain(self, parameters: Mapping[str, Any]) -> Any:
        if self._live.chain.explain is None:
            raise QuestionRefused(
                "nothing is kept of requests; write explain: {} into the engine's chain"
            )
        return answer(self._scheduler.explainer, parameters)

    def close(self) -> None:
        """Remove the socket, also one that is yet to open. Waits for nobody."""
        self._changes.close()
        if self._opening is not None:
            self._opening.add_done_callback(close_result)
