"""TierHalves: the loading and the storing half of one tier, made anew when the tier opens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from tiers.connector.contract.messages import WorkerHandshake
from tiers.connector.policy.cheapest.load_cost import LoadCost
from tiers.connector.scheduler.admission import Admission
from tiers.connector.scheduler.context import TierContext
from tiers.connector.scheduler.loads import TierLoads
from tiers.connector.scheduler.opening import NOT_OPEN, OnEvict, OpenTier
from tiers.connector.scheduler.store_reservations import StoreReservations
from tiers.connector.scheduler.stores import TierStores
from tiers.errors import TierUnusable

logger = logging.getLogger(__name__)

OpenManager = Callable[[Sequence[WorkerHandshake], bool, OnEvict], OpenTier]
"""`TierOpener.open` for one tier."""


class TierHalves:
    """What one tier consists of in the scheduler's process: its `manager`, `loads` and `stores`.

    Those of `NOT_OPEN` until all workers are known, and where the tier can't be used. Used by the
    scheduler's thread alone.
    """

    def __init__(
        self,
        context: TierContext,
        open_manager: OpenManager,
        admission: Admission,
        load_cost: LoadCost,
    ) -> None:
        self._context = context
        self._open_manager = open_manager
        self._admission = admission
        self._load_cost = load_cost
        self._handshakes: dict[int, WorkerHandshake] = {}
        self.manager = NOT_OPEN.manager
        self.loads, self.stores = self._loads_of(NOT_OPEN), self._stores_of(NOT_OPEN)

    def register_workers(
        self, handshakes: Mapping[int, WorkerHandshake], in_step: bool = False
    ) -> None:
        """Take what workers say of themselves; with the last of them the tier opens.

        `in_step`: the engine has begun to serve, so that opening may take a moment only.
        """
        self._handshakes.update(handshakes)
        known, needed = len(self._handshakes), self._context.requests.engine.world_size
        if self._context.health.is_settled or known < needed:
            return
        ranks = [self._handshakes[rank] for rank in sorted(self._handshakes)]
        try:
            tier = self._open_manager(ranks, in_step, self._evicted)
        except TierUnusable as error:
            self.fail(str(error))
            return
        self.manager = tier.manager
        self.loads, self.stores = self._loads_of(tier), self._stores_of(tier)
        self._context.kv_events.keep_in(tier.inventory)
        self._context.health.opened(tier.manager)

    def _loads_of(self, tier: OpenTier) -> TierLoads:
        return TierLoads(self._context, tier.manager, self._load_cost)

    def _stores_of(self, tier: OpenTier) -> TierStores:
        reservations = StoreReservations(tier, self._admission, self._context.health)
        return TierStores(self._context, tier.manager, reservations, self._admission.intake)

    def _evicted(self, key: bytes) -> None:
        self._context.kv_events.evicted(key)
        self._context.tenants.gone((key,))

    def fail(self, reason: str) -> None:
        """Use the tier no more; the first `reason` is logged."""
        if self._context.health.failed():
            tier = self._context.tier
            logger.error("tier %r is unusable and the chain goes on without it: %s", tier, reason)

    def close(self) -> None:
        """Release the tier, which has nothing and wants nothing from now on."""
        self._context.health.failed()
        self._context.kv_events.keep_in(None)
        manager, self.manager = self.manager, NOT_OPEN.manager
        manager.close()
