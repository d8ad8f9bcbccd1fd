"""Which chains vLLM's OffloadingConnector can host, and the tiers of such a chain."""

from __future__ import annotations

from typing import cast

from spec.chain import ChainSpec
from spec.offloading import HostSpec, StoreSpec
from spec.registry import tier_class
from tiers.contract.pool_size import STAGING

UNHOSTED = {"store_threshold", "max_inflight", "store_rate", "load_rate", "write_budget", "verify"}
"""Settings of a tier that decide about loads and stores: here vLLM decides about those."""
UNHOSTED_OF_CHAIN = "tenants", "record", "ghosts", "explain", "events", "max_wait", "max_retained"
"""Settings of a chain that vLLM's connector leaves nobody to obey."""


def hosted_tiers(chain: ChainSpec) -> tuple[HostSpec, StoreSpec | None]:
    """Return the host tier of `chain`, or else one of its `staging` size, and its store, if any.
    Raises ValueError, naming the setting, for a chain that vLLM's OffloadingConnector can't
    host."""
    hosts = [tier for tier in chain.tiers if isinstance(tier, HostSpec)]
    stores = [tier for tier in chain.tiers if isinstance(tier, StoreSpec)]
    if len(hosts) > 1 or len(stores) > 1:
        raise ValueError(
            "vLLM's OffloadingConnector hosts at most one cpu tier and one store; the chain has "
            f"{', '.join(tier.tier_name for tier in chain.tiers)}. Use KVTiersConnector for all."
        )
    said = [key for key in UNHOSTED_OF_CHAIN if key in chain.model_fields_set]
    if unheard := [key for key in said if getattr(chain, key) not in (None, (), {})]:
        raise ValueError(
            f"the chain has {', '.join(unheard)}, which vLLM's OffloadingConnector does not obey; "
            "leave that out, or use KVTiersConnector"
        )
    if chain.on_reset != "forget":
        raise ValueError(
            "the chain has on_reset: keep, but a reset ends the transfers of vLLM's "
            "OffloadingConnector; leave it out, or use KVTiersConnector"
        )
    for tier in chain.tiers:
        unhosted = tier.model_dump(include=UNHOSTED, exclude_defaults=True)
        if unhosted:
            raise ValueError(
                f"tier {tier.tier_name!r} has {', '.join(unhosted)}, which vLLM's "
                "OffloadingConnector does not obey; leave that out, or use KVTiersConnector"
            )
    capacity = chain.staging or STAGING
    staging = tier_class("cpu").model_validate({"type": "cpu", "capacity": capacity})
    return hosts[0] if hosts else cast(HostSpec, staging), stores[0] if stores else None
