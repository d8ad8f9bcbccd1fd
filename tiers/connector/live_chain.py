"""A chain that changes while its engine runs: from a new spec to tiers and settings."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from spec.chain import ChainSpec
from spec.chain_diff import ChainDiff
from spec.offloading import OffloadingSpec
from tiers.concurrency.executors import IoExecutor
from tiers.connector.observers import open_ghosts, open_recorder
from tiers.connector.policy.request_table import RequestTable
from tiers.connector.scheduler.offloading_scheduler import OffloadingScheduler
from tiers.connector.scheduler.open_tier import TierOpener
from tiers.contract.protocols import RequestObserver

logger = logging.getLogger(__name__)


def tenant_names(chain: ChainSpec) -> dict[str, str]:
    """The names of the tenants that metrics show, by their salts."""
    return {salt: rule.name for salt, rule in chain.tenants.items() if rule.name is not None}


class LiveChain:
    """The `Rebuilder` of a chain of tiers. Used by the scheduler's thread, but `refusals`.

    `observers` is the scheduler's own list. Some of them change with the chain: those that `_opens`
    has by the chain's key.
    """

    def __init__(
        self,
        chain: ChainSpec,
        requests: RequestTable,
        opener: TierOpener,
        now: Callable[[], float],
        names: list[str],
        observers: list[RequestObserver],
    ) -> None:
        """`names`: of the places of the chain, which whoever explains requests reads, too."""
        self.chain = chain
        self._requests, self._opener, self._now = requests, opener, now
        self._names = names
        self._observers = observers
        self._opens: Mapping[str, Callable[..., Sequence[RequestObserver]]]
        self._opens = {"record": open_recorder, "ghosts": open_ghosts}
        self._opened = {key: self._open(key, chain) for key in self._opens}
        self._wanted = dict.fromkeys(self._opens, chain)
        """The chains whose observers of each kind are open, or will be; none once it is closed."""
        # Without it observers that open while another chain comes would stay. Held for moments.
        self._exchanging = threading.Lock()
        # One thread closes and opens: two recorders would write one file. It begins when needed.
        self._thread: IoExecutor | None = None
        for some in self._opened.values():
            observers += some

    def refusals(self, new: ChainSpec, found: ChainDiff) -> list[str]:
        gone = found.of_kind("drained", "reopened")
        if gone and self._requests.engine.kv_events:
            return [
                f"tier {name}: routers were told of its blocks by KV events, and would go on "
                "sending requests here for them: restart the engine without it"
                for name in gone
            ]
        return []

    def make(self, tier: OffloadingSpec, chain: ChainSpec) -> OffloadingScheduler:
        return OffloadingScheduler(tier, chain, self._requests, self._opener, self._now)

    def apply(self, chain: ChainSpec, tiers: Sequence[OffloadingScheduler]) -> None:
        before, self.chain = self.chain, chain
        self._requests.retune(chain.max_wait, chain.store)
        self._requests.tenants.names = tenant_names(chain)
        for spec, tier in zip(chain.tiers, tiers, strict=True):
            tier.retune(spec, chain)
            if before.warm != chain.warm:
                tier.stop_warming()
            if spec.tier_name not in self._names:
                self._names.append(spec.tier_name)
        if before.record != chain.record:
            self._reopen("record", chain)
        if before.ghosts != chain.ghosts or (chain.ghosts and before.tiers != chain.tiers):
            self._reopen("ghosts", chain)

    def _reopen(self, key: str, chain: ChainSpec) -> None:
        """Close the observers of a kind, and open those of this chain, beside the steps."""
        try:
            self._thread = self._thread or IoExecutor(1, "reopen")
        except RuntimeError as error:
            logger.warning("%s: stays as it was before the change: %s", key, error)
            return
        with self._exchanging:
            old, self._opened[key], self._wanted[key] = self._opened[key], (), chain
            for observer in old:
                self._observers.remove(observer)
        self._thread.submit(self._exchange, key, old, chain)

    def _exchange(self, key: str, old: Sequence[RequestObserver], chain: ChainSpec) -> None:
        """On a thread. Where another chain comes meanwhile, that one opens its own."""
        _close_all(old)
        if self._wanted.get(key) is not chain:
            return
        opened = self._open(key, chain)
        with self._exchanging:
            if self._wanted.get(key) is chain:
                self._opened[key] = opened
                self._observers += opened
                return
        _close_all(opened)

    def _open(self, key: str, chain: ChainSpec) -> Sequence[RequestObserver]:
        try:
            return self._opens[key](self._requests, self._opener, self._now, chain)
        except RuntimeError as error:
            logger.warning("%s: left out until its settings change: %s", key, error)
            return ()

    def close(self) -> None:
        with self._exchanging:
            self._wanted.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=False)


def _close_all(observers: Sequence[RequestObserver]) -> None:
    for observer in observers:
        observer.close()
