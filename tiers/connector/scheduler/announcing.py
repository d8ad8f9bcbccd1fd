"""Announcing: a log line for the chain, and one for each tier when it opens, at start or later."""

from __future__ import annotations

import logging

from spec.chain import ChainSpec
from spec.errors import describe_error, one_line
from spec.fields import format_size
from spec.offloading import HostSpec, OffloadingSpec, StoreSpec
from tiers.store import Described, Measured, TierStore, capability
from tiers.wrappers.opening import log_name

logger = logging.getLogger(__name__)


class Announcer:
    """Tells the operator what opened, by one line each at level INFO. Thread-safe."""

    def __init__(self, chain: ChainSpec) -> None:
        self._chain = chain

    def chain(self, payload_bytes: int, ranks: int, slots: int) -> None:
        """The workers are known: blocks have `payload_bytes` on each of `ranks` processes, and
        each of those has `slots` slots of host memory."""
        logger.info(
            "chain of %d tier(s): load policy %s, blocks of %s on each of %d rank(s), %d slots of "
            "host memory on each",
            len(self._chain.tiers),
            self._chain.load_policy,
            format_size(payload_bytes),
            ranks,
            slots,
        )

    def host(self, tier: HostSpec, slots: int) -> None:
        """A host tier, which begins empty, may keep `slots` blocks."""
        self._say(tier, [f"capacity {format_size(tier.capacity)}", f"room for {slots} blocks"])

    def store(self, tier: StoreSpec, store: TierStore) -> None:
        """A store has opened. Called on the thread that opened it, since the store is asked."""
        try:
            self._say(tier, _facts(store))
        except Exception as error:  # noqa: BLE001 - a plugin's: what it can't tell ends nothing
            self._say(tier, [f"it can't tell what it holds: {describe_error(error)}"])

    def _say(self, tier: OffloadingSpec, facts: list[str]) -> None:
        place = 1 + [one.tier_name for one in self._chain.tiers].index(tier.tier_name)
        logger.info(
            "tier %r is open, load priority %d of %d: %s",
            log_name(tier),
            place,
            len(self._chain.tiers),
            one_line(", ".join(facts)) or f"type {tier.type}",
        )


def _facts(store: TierStore) -> list[str]:
    facts = []
    if (described := capability(store, Described)) is not None:
        facts.append(described.describe())
    if (measured := capability(store, Measured)) is not None:
        usage = measured.usage()
        if usage.capacity is not None:
            facts.append(f"capacity {format_size(usage.capacity)}")
        facts.append(f"{usage.blocks} blocks held ({format_size(usage.used)})")
    return facts
