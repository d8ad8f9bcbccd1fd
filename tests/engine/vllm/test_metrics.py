"""What /metrics shows of a chain before its engine has served anything."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tests.engine.vllm.metrics import Samples
from tiers.contract.stats import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    OF_CHAIN,
    OF_TENANT,
    STATES,
    TierStats,
)

pytestmark = pytest.mark.vllm

OF_TIER = (
    *(f"{name}_total" for name in COUNTERS if name not in OF_CHAIN | OF_TENANT),
    *(name for name in GAUGES if "ghost" not in name),
    *(f"{name}_count" for name in HISTOGRAMS),
)
SALT = "salt-of-a-tenant"
CHAIN = {
    "version": 1,
    "tenants": {SALT: {"name": "gold"}},
    "tiers": [
        {"type": "cpu", "capacity": "1MiB"},
        {"type": "disk", "capacity": "1MiB", "path": "/nowhere", "name": "ssd"},
    ],
}


class Scraped:
    """The metrics of an engine with these extra settings of its connector."""

    def __init__(self, extra: dict[str, Any]) -> None:
        from tiers.engine.vllm import KVTiersConnector
        from tiers.engine.vllm_stats import MultiKVConnectorStats

        registry = CollectorRegistry()
        kinds: dict[Any, Any] = {
            k: partial(k, registry=registry) for k in (Counter, Gauge, Histogram)
        }
        transfer = SimpleNamespace(
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
            engine_id="one",
            kv_role="kv_both",
        )
        labels: dict[int, list[object]] = {0: ["model", "0"], 1: ["model", "1"]}
        config: Any = SimpleNamespace(kv_transfer_config=transfer, parallel_config=None)
        self._registry = registry
        self._stats = MultiKVConnectorStats
        self._metrics = KVTiersConnector.build_prom_metrics(
            config, kinds, ["model_name", "engine"], labels
        )

    def observe(self, tier: str, **measures: float) -> None:
        stats = TierStats()
        stats.add(tier, measures)
        whole = self._stats()
        whole.add("", stats, None)
        self._metrics.observe(whole.to_dict(), 1)

    def page(self) -> str:
        return generate_latest(self._registry).decode()

    def samples(self) -> Samples:
        return Samples(self.page())


def test_every_metric_of_every_tier_is_there_at_zero_before_the_first_request() -> None:
    found = Scraped({"chain": CHAIN}).samples()
    for engine in ("0", "1"):
        for tier in ("cpu", "ssd"):
            at = {"engine": engine, "tier": tier}
            assert {n: found.value(n, **at) for n in OF_TIER} == dict.fromkeys(OF_TIER, 0.0)
            for state in STATES:
                assert found.value("tier_state", state=state, **at) == (state == "opening")
            with pytest.raises(ValueError, match="got 0"):  # nothing estimates its hits
                found.value("ghost_hit_ratio", **at)
        for name in OF_CHAIN:
            assert found.value(f"{name}_total", engine=engine, tier="(chain)") == 0
        for name in OF_TENANT:
            for tenant in ("gold", "(other)"):
                assert found.value(f"{name}_total", engine=engine, tenant=tenant) == 0


@pytest.mark.parametrize("ours", ["", "ours/"])
def test_what_a_change_of_the_chain_brings_is_there_at_zero_and_begins_once(ours: str) -> None:
    """A rule that adds several metrics has no value while one of them is missing."""
    scraped = Scraped({"chain": CHAIN})
    for once in ({"capacity_bytes": 7}, {}):
        scraped.observe(f"{ours}redis", tier_state=1, hits=2, **once)
        scraped.observe(f"{ours}(tenant) silver", tenant_hit_tokens=3)
        scraped.observe(f"{ours}(chain)", prompt_tokens=4)
        scraped.observe("redis (capacity: 2x)", ghost_hit_ratio=0.5)
    found = scraped.samples()
    at = {"engine": "1", "tier": f"{ours}redis"}
    told = {"hits_total": 4.0, "capacity_bytes": 7.0}
    assert {name: found.value(name, **at) for name in OF_TIER} == dict.fromkeys(OF_TIER, 0.0) | told
    assert found.value("tier_state", state="open", **at) == 1
    of_tenant = {name: found.value(f"{name}_total", tenant=f"{ours}silver") for name in OF_TENANT}
    assert of_tenant == dict.fromkeys(OF_TENANT, 0.0) | {"tenant_hit_tokens": 6.0}
    of_chain = {
        name: found.value(f"{name}_total", **at | {"tier": f"{ours}(chain)"}) for name in OF_CHAIN
    }
    assert of_chain == dict.fromkeys(OF_CHAIN, 0.0) | {"prompt_tokens": 8.0}
    with pytest.raises(ValueError, match="got 0"):  # nobody looks a ghost up
        found.value("lookups_total", tier="redis (capacity: 2x)")


def test_no_metric_shows_a_salt() -> None:
    scraped = Scraped({"chain": CHAIN})
    scraped.observe("(tenant) gold", tenant_hit_tokens=3)
    assert scraped.samples().value("tenant_hit_tokens_total", engine="1", tenant="gold") == 3
    assert SALT not in scraped.page()


def test_a_state_is_one_of_all() -> None:
    scraped = Scraped({"chain": CHAIN})
    for state in STATES:
        scraped.observe("ssd", tier_state=STATES.index(state), hits=2)
        found = scraped.samples()
        shown = {s: found.value("tier_state", state=s, engine="1", tier="ssd") for s in STATES}
        assert shown == {s: float(s == state) for s in STATES}
        assert found.value("tier_state", state="opening", engine="0", tier="ssd") == 1
    assert found.value("hits_total", engine="1", tier="ssd") == 2 * len(STATES)


def test_tiers_of_a_listed_chain_are_there_by_its_name() -> None:
    ours = {
        "kv_connector": "KVTiersConnector",
        "kv_connector_module_path": "tiers.engine.vllm",
        "kv_connector_extra_config": {"chain": CHAIN},
        "name": "ours",
    }
    found = Scraped({"connectors": [ours]}).samples()
    assert found.value("tier_state", state="opening", engine="0", tier="ours/ssd") == 1


def test_a_chain_that_is_not_on_this_host_keeps_nobody_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scraped = Scraped({"chain": str(tmp_path / "elsewhere.yaml")})
    scraped.observe("ssd", tier_state=1)
    assert scraped.samples().value("tier_state", state="open", engine="1", tier="ssd") == 1
