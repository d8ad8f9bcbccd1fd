"""vLLM's example connector, which loads within a step, losing part of all that it loads."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

from tests.engine.vllm.tiny_vllm import BLOCK_TOKENS

KEPT = 5
"""Blocks at the head of each prompt that it does load."""


class FailingExample(ExampleConnector):  # type: ignore[misc]
    """Leaves rubbish in every block from the sixth of a prompt on, and says so."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        self._lost: set[int] = set()
        for request in self._get_connector_metadata().requests:
            if not request.is_store:
                blocks = (request.slot_mapping[::BLOCK_TOKENS] // BLOCK_TOKENS).tolist()
                self._lost.update(blocks[KEPT:])
        for layer in forward_context.no_compile_layers.values():
            for block in self._lost:
                layer.kv_cache[block].fill_(7.0)

    def get_block_ids_with_load_errors(self) -> set[int]:
        lost, self._lost = self._lost, set()
        return lost
