"""MultiConnector: a chain of connectors behind the contract of one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from spec.chain import CheapestSpec, LoadPolicy
from tiers.connector.contract.connector import Connector
from tiers.connector.contract.engine import Role
from tiers.connector.contract.media import MediaMarks, NoMedia
from tiers.connector.contract.protocols import Blocks, ConnectorOutput, Request, SchedulerOutput
from tiers.connector.contract.stats import TierStats
from tiers.connector.multi.metadata import (
    MultiConnectorMetadata,
    MultiHandshakeMetadata,
    MultiWorkerMetadata,
)
from tiers.connector.multi.worker import MultiWorker
from tiers.connector.policy.cheapest.cheapest import Cheapest, load_costs
from tiers.connector.policy.choice import LATER, NOBODY, Choice, clip
from tiers.connector.policy.chooser import Chooser
from tiers.connector.policy.load_sharing import LoadSharing
from tiers.connector.policy.loaders import BlockLoader
from tiers.connector.policy.shared_load import SharedLoad
from tiers.connector.policy.wait_budget import WaitBudget


class MultiConnector(MultiWorker):
    """Loads from the children that the load policy chooses; stores to all."""

    limits_requests = True
    """It applies what a request says of itself (see `limits`), also as a child of another."""

    def __init__(
        self,
        role: Role,
        children: Sequence[Connector],
        *,
        names: Sequence[str] | None = None,
        chain: str = "",
        load_policy: LoadPolicy = "first",
        block_tokens: int = 1,
        window: int = 0,
        drops_last: bool = False,
        cheapest: CheapestSpec | None = None,
        now: Callable[[], float] = time.monotonic,
        wait_budget: WaitBudget | None = None,
        sharing: LoadSharing | None = None,
        media: MediaMarks | None = None,
    ) -> None:
        """`names`: of the children, unique. `chain`: differs between chains of one engine.
        `window`: blocks at the end of a prefix that must be whole (see `BlockGroups`).
        `drops_last`: see `EngineInfo`. `cheapest`: settings of the load policy of that name.
        `now`: seconds, never going back. `wait_budget`: that of the children; none: requests wait
        as long as it takes. `sharing`: of loads, where children are tiers. `media`: the marks that
        the children use."""
        super().__init__(role, children, names=names, chain=chain)
        self._block_tokens = block_tokens
        self._cheapest: Cheapest | None = None
        if load_policy == "cheapest":
            self._cheapest = Cheapest(
                cheapest or CheapestSpec(),
                block_tokens,
                load_costs(children),
                now,
                cut=window == 0,
            )
        self._chooser = Chooser(
            self.children,
            self.names,
            load_policy,
            block_tokens,
            window=window,
            drops_last=drops_last,
            cheapest=self._cheapest,
        )
        self._choices: dict[str, Choice] = {}
        self._sharing = sharing
        self._undecided: set[str] = set()
        self._wait_budget = wait_budget or WaitBudget(now)
        self._media = media or NoMedia()

    def shutdown(self) -> None:
        """Shut every child down, also when one raises; then raise."""
        self.for_each(lambda child: child.shutdown())

    def get_kv_connector_stats(self) -> TierStats | None:
        """All tiers' counters, by tier name."""
        stats = [s for s in self.stats_by_child().values() if isinstance(s, TierStats)]
        if not stats:
            return None
        total = TierStats()
        for one in stats:
            total.aggregate(one)
        return total

    def stats_by_child(self) -> dict[str, Any]:
        """What each child counted since the last call, in its own form, by the child's name."""
        stats = {
            name: child.get_kv_connector_stats()
            for name, child in zip(self.names, self.children, strict=True)
        }
        return {name: one for name, one in stats.items() if one is not None}

    # -- scheduler ---------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """What the children that the policy chooses have."""
        choice = self._choose(request, num_computed_tokens)
        self._choices[request.request_id] = choice._replace(computed=num_computed_tokens)
        self._undecided.add(request.request_id)
        return choice.tokens, choice.is_async

    def _choose(self, request: Request, computed: int) -> Choice:
        request_id = request.request_id
        # Also one that nobody may load anything for: whoever begins it asks for its marks, and the
        # engine would wait for them.
        if not self._media.ready(request):
            return LATER
        if self._sharing is not None and self._sharing.waits(request_id):
            return LATER
        if self._wait_budget.left(request_id) <= 0:
            return NOBODY
        choice = self._chooser.choose(request, computed)
        if choice.tokens is None:
            self._wait_budget.looks(request_id)
            return choice
        self._wait_budget.found(request_id)
        if self._sharing is not None and self._sharing.joins(request, computed, choice.tokens):
            return LATER
        return choice

    def update_state_after_alloc(
        self, request: Request, blocks: Blocks, num_external_tokens: int
    ) -> None:
        """Serving children load; the others learn of the blocks, so that they can store them."""
        choice = self._choices.get(request.request_id, NOBODY)
        if request.request_id in self._undecided:
            # Engines call again, with no tokens, when a load beside the steps has ended.
            self._undecided.discard(request.request_id)
            loads = not choice.tokens or num_external_tokens > 0
            self._chooser.decided(request.request_id, choice if loads else NOBODY)
        shares = clip(choice.shares or {}, num_external_tokens // self._block_tokens)
        if choice.child is not None and num_external_tokens:
            if choice.is_async:
                self._chooser.loads(request.request_id, choice.child)
            else:
                self.disable_store(request)
        if num_external_tokens and choice.tokens:
            self._wait_budget.loads(request.request_id)
            if self._sharing is not None:
                self._sharing.begins(request, choice.computed, num_external_tokens)
        shared = SharedLoad(len(shares))
        if len(shares) > 1:
            self._extra_async_loads[request.request_id] = len(shares) - 1
        for index, child in enumerate(self.children):
            if index in shares:
                assert isinstance(child, BlockLoader)
                child.load_blocks(request, blocks, shares[index], shared)
            else:
                tokens = num_external_tokens if index == choice.child else 0
                child.update_state_after_alloc(request, blocks, tokens)

    def disable_store(self, request: Request) -> None:
        """None of our own children stores it; others have no such member."""

        def disable_store(child: Connector) -> None:
            if hasattr(child, "disable_store"):
                child.disable_store(request)

        self.for_each(disable_store)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[str, int]:
        """What each serving child says of its part of the tokens."""
        sources: Counter[str] = Counter()
        for index, tokens in self._tokens_of_each(request, num_external_tokens).items():
            child = self.children[index]
            sources.update(child.get_external_cache_hit_sources(request, tokens))
        return dict(sources)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Groups that the serving children load."""
        serving = self._tokens_of_each(request, None)
        groups = [self.children[i].get_loaded_kv_cache_group_ids(request) for i in serving]
        return tuple(sorted(set().union(*groups)))

    def _tokens_of_each(self, request: Request, tokens: int | None) -> dict[int, int]:
        """How many of so many tokens (None: all found) each serving child loads."""
        choice = self._choices.get(request.request_id, NOBODY)
        tokens = (choice.tokens or 0) if tokens is None else tokens
        if choice.child is not None:
            return {choice.child: tokens}
        shares = clip(choice.shares or {}, tokens // self._block_tokens)
        return {i: sum(map(len, parts)) * self._block_tokens for i, parts in shares.items()}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MultiConnectorMetadata:
        """All children's orders, and, once, the saves and loads to wait for."""
        self._chooser.runs(scheduler_output)
        saves, self._extra_async_saves = self._extra_async_saves, {}
        loads, self._extra_async_loads = self._extra_async_loads, {}
        metadata = tuple(child.build_connector_meta(scheduler_output) for child in self.children)
        step = self._cheapest.prefill.step_begins(scheduler_output) if self._cheapest else None
        return MultiConnectorMetadata(metadata, saves, loads, step)

    def update_connector_output(self, connector_output: ConnectorOutput) -> None:
        """Show each child its own metadata only; the output is as it was afterwards."""
        whole = connector_output.kv_connector_worker_meta
        self._chooser.step_ended(getattr(whole, "step", None))
        parts = whole.metadata if isinstance(whole, MultiWorkerMetadata) else ()
        mine = iter(parts or (None,) * len(self.children))

        def update(child: Connector) -> None:
            connector_output.kv_connector_worker_meta = next(mine)
            child.update_connector_output(connector_output)

        try:
            self.for_each(update)
        finally:
            connector_output.kv_connector_worker_meta = whole

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Tell every child; the request's blocks stay while any of them is saving it."""
        return self._finish(request, lambda child: child.request_finished(request, block_ids))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`, with the blocks of each KV cache group."""
        if not all(hasattr(child, "request_finished_all_groups") for child in self.children):
            # An engine's connector for one group only; the engine then has no more.
            (only,) = block_ids
            return self.request_finished(request, only)
        return self._finish(
            request, lambda child: child.request_finished_all_groups(request, block_ids)
        )

    def _finish(
        self, request: Request, tell: Callable[[Connector], tuple[bool, dict[str, Any] | None]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Tell every child, also when one raises, and forget the request in any case."""
        answers: list[tuple[bool, dict[str, Any] | None]] = []
        try:
            self.for_each(lambda child: answers.append(tell(child)))
            merged: dict[str, Any] | None = None
            for params in (params for _, params in answers if params is not None):
                merged = _merge(merged or {}, params)
        finally:
            self._choices.pop(request.request_id, None)
            self._undecided.discard(request.request_id)
            self._chooser.forget(request.request_id)
            self._wait_budget.forget(request.request_id)
            self._media.forget(request.request_id)
            if self._sharing is not None:
                self._sharing.forget(request.request_id)
        saving = sum(is_saving for is_saving, _ in answers)
        if saving > 1:
            self._extra_async_saves[request.request_id] = saving - 1
        return saving > 0, merged

    def register_finished_partial_tail(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        """Offer the tail to every child; whether any takes it."""
        taken = [
            child.register_finished_partial_tail(request, block_ids, partial_tail_offloads)
            for child in self.children
        ]
        return any(taken)

    def set_xfer_handshake_metadata(self, metadata: Mapping[Any, Any]) -> None:
        """Give each child what its own workers said."""
        for child, said in self._said_to_each(metadata):
            child.set_xfer_handshake_metadata(said)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[Any, Any]) -> None:
        """The same, with workers named by (pipeline rank, tensor rank)."""
        for child, said in self._said_to_each(metadata):
            child.set_xfer_handshake_metadata_pp_aware(said)

    def _said_to_each(
        self, metadata: Mapping[Any, Any]
    ) -> Iterator[tuple[Connector, dict[Any, Any]]]:
        ours = {
            worker: whole.metadata
            for worker, whole in metadata.items()
            if isinstance(whole, MultiHandshakeMetadata) and whole.chain == self._chain
        }
        for index, child in enumerate(self.children):
            parts = {worker: whole[index] for worker, whole in ours.items()}
            # One that says nothing is called all the same, as an engine calls it.
            yield child, {worker: part for worker, part in parts.items() if part is not None}

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Every child may look into the engine's cache manager."""
        self.for_each(lambda child: child.bind_kv_cache_manager(kv_cache_manager))

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Every child may look into the engine's block pool."""
        self.for_each(lambda child: child.bind_gpu_block_pool(gpu_block_pool))

    def on_new_request(self, request: Request) -> None:
        """Every child learns of a request before it is first asked for it."""
        self.for_each(lambda child: child.on_new_request(request))

    def take_events(self) -> Iterator[Any]:
        """All children's events, in order."""
        for child in self.children:
            yield from child.take_events()

    def reset_cache(self) -> bool:
        """Reset every child; False: one refuses."""
        answers: list[bool | None] = []
        self.for_each(lambda child: answers.append(child.reset_cache()))
        return False not in answers

    def has_pending_push_work(self) -> bool:
        """Whether any child needs steps."""
        return any(child.has_pending_push_work() for child in self.children)

    def has_pending_block_frees(self) -> bool:
        """Whether any child will soon give blocks back."""
        return any(child.has_pending_block_frees() for child in self.children)

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether any child must not lose a save."""
        return any(child.requires_kv_delivery for child in self.children)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether every child does."""
        return bool(self.children) and all(
            child.supports_divergent_local_hybrid_hits for child in self.children
        )


def _merge(params: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    clash = params.keys() & more.keys()
    if clash:
        _clash(clash)
    return params | more


def _clash(keys: set[str]) -> NoReturn:
    raise RuntimeError(f"several tiers set the transfer parameter {', '.join(sorted(keys))}")
