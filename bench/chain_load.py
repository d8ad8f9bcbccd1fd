"""A load from a tier as a request sees it: from the lookup to blocks in the paged KV."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from bench.scheduled import Output, Step
from spec.chain import ChainSpec
from spec.offloading import OffloadingSpec
from tiers.connector.assembly import scheduler_parts, worker_parts
from tiers.connector.multi.multi_connector import MultiWorkerMetadata
from tiers.connector.multi.multi_scheduler import MultiScheduler
from tiers.connector.multi.multi_worker import MultiWorker
from tiers.contract.engine_info import EngineInfo
from tiers.gpu.copier import open_copier
from tiers.host.slots import slot_stride
from tiers.lab.replay.engine import IDLE_SECONDS
from tiers.lab.replay.requests import NewRequest

TOKENS = 16


@dataclass
class Prompt:
    """A prompt of full blocks whose KV is in the paged blocks `table`."""

    request_id: str
    block_hashes: list[bytes]
    table: list[int]
    num_computed_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """One more than the blocks have: the last token is always computed."""
        return len(self.block_hashes) * TOKENS + 1

    @property
    def num_prompt_tokens(self) -> int:
        """All of its tokens."""
        return self.num_tokens

    def get_block_ids(self) -> tuple[list[int], ...]:
        """One group."""
        return (self.table,)


class ChainLoads:
    """Both halves of a chain of one tier that holds a prompt, of blocks of `payload` bytes."""

    def __init__(
        self,
        tier: OffloadingSpec,
        paged: Mapping[str, torch.Tensor],
        table: Sequence[int],
        payload: int,
    ) -> None:
        """The prompt's blocks are `table`. Returns once the tier has them all."""
        num_blocks = next(iter(paged.values())).shape[0]
        room = 2 * len(table) * slot_stride(payload)
        chain = ChainSpec(version=1, load_when="always", staging=room, tiers=(tier,))
        engine = EngineInfo({}, TOKENS, TOKENS, num_blocks)
        self._scheduler = MultiScheduler(*scheduler_parts(chain, engine))
        self._worker = MultiWorker(*worker_parts(chain, engine, open_copier))
        self._worker.register_kv_caches(paged)
        self._hashes = [n.to_bytes(32, "little") for n in range(len(table))]
        self._table = list(table)
        self._loads = 0
        self._hear()
        self._store()

    def _store(self) -> None:
        prompt = Prompt("store", self._hashes, self._table)
        self._scheduler.get_num_new_matched_tokens(prompt, 0)
        self._scheduler.update_state_after_alloc(prompt, prompt, 0)
        new = NewRequest("store", prompt.get_block_ids(), 0)
        self._step(Step([new], {"store": prompt.num_tokens}))
        self._worker.wait_for_save()
        while self._scheduler.has_pending_push_work():
            self._hear()
        self._scheduler.request_finished(prompt, [])
        while self._held("is it there") < len(self._table) * TOKENS:
            self._step(Step([], {}))
            self._worker.get_finished(set())
            self._hear()
            time.sleep(IDLE_SECONDS)  # else those who store wait for the interpreter

    def _held(self, name: str) -> int:
        prompt = Prompt(name, self._hashes, self._table)
        tokens = self._scheduler.get_num_new_matched_tokens(prompt, 0)[0]
        self._scheduler.update_state_after_alloc(prompt, prompt, 0)
        self._scheduler.request_finished(prompt, [])
        return tokens or 0

    def load(self, launch: Callable[[], object] = int) -> None:
        """Look the prompt up, load it whole, and return when its blocks are in the paged KV.
        `launch`: launches the forward of the step that begins the load."""
        self._loads += 1
        prompt = Prompt(f"load {self._loads}", self._hashes, self._table)
        tokens, _ = self._scheduler.get_num_new_matched_tokens(prompt, 0)
        assert tokens == len(self._table) * TOKENS, "the tier has it all"
        self._scheduler.update_state_after_alloc(prompt, prompt, tokens)
        self._step(Step([], {}))
        launch()
        self._worker.start_load_kv(None)
        while prompt.request_id not in (self._worker.get_finished(set())[1] or ()):
            pass
        assert not self._worker.get_block_ids_with_load_errors()
        self._hear()
        self._scheduler.request_finished(prompt, [])

    def _step(self, step: Step) -> None:
        self._worker.bind_connector_metadata(self._scheduler.build_connector_meta(step))

    def _hear(self) -> None:
        said = self._worker.build_connector_worker_meta()
        if isinstance(said, MultiWorkerMetadata):
            self._scheduler.update_connector_output(Output(said))

    def close(self) -> None:
        """Close both halves."""
        self._worker.shutdown()
        self._scheduler.shutdown()
