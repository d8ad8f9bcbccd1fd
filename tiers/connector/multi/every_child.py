"""EveryChild: what an engine asks of a chain's scheduler half, and all children answer alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tiers.connector.multi.connector import MultiConnector
from tiers.connector.multi.metadata import MultiHandshakeMetadata
from tiers.contract.connector import SchedulerConnector
from tiers.contract.protocols import Request


class EveryChild(MultiConnector[SchedulerConnector], SchedulerConnector):
    """Members that go to every child, in order; what any or all of them answer is the answer. Who
    loads is left to `MultiScheduler`."""

    def register_finished_partial_tail(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        taken = [
            child.register_finished_partial_tail(request, block_ids, partial_tail_offloads)
            for child in self.children
        ]
        return any(taken)

    def set_xfer_handshake_metadata(self, metadata: Mapping[Any, Any]) -> None:
        for child, said in zip(self.children, self._said_to_each(metadata), strict=True):
            child.set_xfer_handshake_metadata(said)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[Any, Any]) -> None:
        for child, said in zip(self.children, self._said_to_each(metadata), strict=True):
            child.set_xfer_handshake_metadata_pp_aware(said)

    def _said_to_each(self, metadata: Mapping[Any, Any]) -> Iterator[dict[Any, Any]]:
        ours = {
            worker: whole.metadata
            for worker, whole in metadata.items()
            if isinstance(whole, MultiHandshakeMetadata) and whole.chain == self._chain
        }
        for index in range(len(self.children)):
            # A child to which nobody said anything is told so, as an engine would.
            yield {worker: said[index] for worker, said in ours.items() if said[index] is not None}

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self.for_each(lambda child: child.bind_kv_cache_manager(kv_cache_manager))

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.for_each(lambda child: child.bind_gpu_block_pool(gpu_block_pool))

    def on_new_request(self, request: Request) -> None:
        self.for_each(lambda child: child.on_new_request(request))

    def take_events(self) -> Iterator[Any]:
        for child in self.children:
            yield from child.take_events()

    def reset_cache(self) -> bool:
        answers: list[bool | None] = []
        self.for_each(lambda child: answers.append(child.reset_cache()))
        return False not in answers

    def get_finished_count(self) -> int | None:
        """The count that all children name; None if any leaves it to the engine.

        Raises ValueError, naming them, if they disagree.
        """
        counts = [child.get_finished_count() for child in self.children]
        if None in counts:
            return None
        if len(set(counts)) > 1:
            pairs = zip(self.names, counts, strict=True)
            named = ", ".join(f"{name}: {count}" for name, count in pairs)
            raise ValueError(f"connectors disagree on how often a request finishes ({named})")
        return next(iter(counts), None)

    def has_pending_push_work(self) -> bool:
        return any(child.has_pending_push_work() for child in self.children)

    def has_pending_block_frees(self) -> bool:
        return any(child.has_pending_block_frees() for child in self.children)

    @property
    def requires_kv_delivery(self) -> bool:
        return any(child.requires_kv_delivery for child in self.children)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return bool(self.children) and all(
            child.supports_divergent_local_hybrid_hits for child in self.children
        )
