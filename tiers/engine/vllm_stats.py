"""The metrics of the tiers as vLLM takes them: for its log line and for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from tiers.contract.stats import (
    CHAIN,
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    MEASURES,
    OF_CHAIN,
    OF_TENANT,
    STATE,
    STATE_MEANS,
    STATES,
    TENANT,
    Measures,
    TierStats,
    merge,
)
from tiers.engine.vllm_children import child_configs, made_by

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass
class MultiKVConnectorStats(KVConnectorStats):  # type: ignore[misc]
    """Stats of an interval by name: a tier's measures, or another connector's own stats object,
    whose class is found by `makers`. A tier of a child is `child/tier`."""

    data: dict[str, Any] = field(default_factory=dict)
    makers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, name: str, stats: Any, maker: dict[str, Any] | None) -> None:
        if isinstance(stats, TierStats):
            self.data.update(stats.data)
        elif isinstance(stats, MultiKVConnectorStats):
            self.data.update({f"{name}/{inner}": one for inner, one in stats.data.items()})
            self.makers.update({f"{name}/{inner}": one for inner, one in stats.makers.items()})
        else:
            self.data[name] = stats
            if maker is not None:
                self.makers[name] = maker

    def reset(self) -> None:
        for _, stats in self._others():
            stats.reset()
        for measures in self._tiers().values():
            measures.clear()

    def aggregate(self, other: KVConnectorStats) -> MultiKVConnectorStats:
        for name, theirs in other.data.items():
            if isinstance(theirs, dict):
                merge(self.data.setdefault(name, {}), theirs)
            else:
                mine = self.data.get(name)
                self.data[name] = theirs if mine is None else mine.aggregate(theirs)
        self.makers.update(getattr(other, "makers", {}))
        return self

    def reduce(self) -> dict[str, Any]:
        """Return what a log line shows: one text of all tiers, and the stats of other connectors by
        their name."""
        others = {name: stats.reduce() for name, stats in self._others()}
        return {**TierStats(self._tiers()).reduce(), **others}

    def is_empty(self) -> bool:
        return TierStats(self._tiers()).is_empty() and all(s.is_empty() for _, s in self._others())

    def to_dict(self) -> dict[str, Any]:
        """Plain data from which `rebuild` makes the same stats in another process."""
        plain: dict[str, Any] = dict(self._tiers())
        for name, stats in self._others():
            made = self.makers.get(name)
            plain[name] = {**made, "stats": stats.to_dict()} if made else stats.to_dict()
        return plain

    def __getitem__(self, name: str) -> Any:
        # vLLM 0.29's MultiConnector takes stats of its own process for serialised ones.
        return self.data if name == "data" and name not in self.data else self.data[name]

    def _tiers(self) -> dict[str, Measures]:
        return {name: one for name, one in self.data.items() if isinstance(one, dict)}

    def _others(self) -> list[tuple[str, KVConnectorStats]]:
        return [(name, one) for name, one in self.data.items() if not isinstance(one, dict)]


def rebuild(data: Mapping[str, Any] | None) -> MultiKVConnectorStats:
    """Rebuild stats from what `to_dict` made, from live objects, or from both, and from vLLM's own
    form, in which a name is that of a registered connector. Raises ValueError for one that is none.
    A connector without stats of its own kind is left out."""
    whole = MultiKVConnectorStats()
    for name, value in (data or {}).items():
        if isinstance(value, KVConnectorStats):
            whole.data[name] = value
        elif value.keys() <= MEASURES:
            merge(whole.data.setdefault(name, {}), value)
        else:
            maker, inner = None, value
            if "kv_connector" in value:
                maker, inner = {k: v for k, v in value.items() if k != "stats"}, value["stats"]
            named = KVConnectorFactory.get_connector_class_by_name
            stats = (made_by(maker) if maker else named(name)).build_kv_connector_stats(data=inner)
            if stats is not None:
                whole.add(name, stats, maker)
    return whole


class KVTiersPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:kvtiers_<measure>{tier="<name>"}` beside vLLM's own metrics, registered once. Each is
    there from the start, at 0, or from the first report of what a change of the chain brings: what
    comes first must be an increase, too. But for what ghosts estimate, of which 0 would be one.

    The prefix is vLLM's because its offline `get_metrics` shows no others. Other connectors'
    metrics are made by their classes; children that make one of the same name share it, also
    where one of them has children of its own, ours among them.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        tiers: Sequence[str] = (),
    ) -> None:
        """`tiers`: the names of all that are configured, whether or not they ever open, and the
        entries of tenants."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        once = _once(metric_types)
        self._metrics = _register(once, labelnames)
        self._others: dict[str, KVConnectorPromMetrics] = {
            child.name: child.cls.build_prom_metrics(
                child.vllm_config, once, labelnames, per_engine_labelvalues
            )
            for child in child_configs(vllm_config)
            if child.cls.__name__ != "KVTiersConnector"
        }
        self._begun: set[tuple[object, ...]] = set()
        for labels in per_engine_labelvalues.values():
            for tier in (*tiers, CHAIN) if tiers else ():
                self._begin(labels, tier)

    def _begin(self, labels: Sequence[object], tier: str) -> None:
        """Show what is measured of a tier, a tenant or a chain, once."""
        if (*labels, tier) in self._begun:
            return
        self._begun.add((*labels, tier))
        of_tenant, of_chain = TENANT in tier, tier.endswith(CHAIN)
        for name, metric in self._metrics.items():
            of = (name in OF_TENANT, name in OF_CHAIN)
            if of == (of_tenant, of_chain) and not name.startswith((STATE, "ghost_")):
                child = metric.labels(*labels, tier.replace(TENANT, ""))
                if name in COUNTERS:
                    child.inc(0)
                elif name in GAUGES:
                    child.set(0)
        if not of_chain and not of_tenant:
            self._set_state([*labels, tier], STATES.index("opening"))

    def _set_state(self, labels: Sequence[object], state: float) -> None:
        for place, name in enumerate(STATES):
            self._metrics[STATE].labels(*labels, name).set(float(place == state))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if "kv_connector" in value:
                if (other := self._others.get(name)) is not None:
                    other.observe(value["stats"], engine_idx)
                continue
            if STATE in value or TENANT in name or name.endswith(CHAIN):  # no ghost
                self._begin(labels, name)
            for measure, measured in value.items():
                if measure == STATE:
                    self._set_state([*labels, name], measured)
                    continue
                metric = self._metrics[measure].labels(*labels, name.replace(TENANT, ""))
                if measure in COUNTERS:
                    metric.inc(measured)
                elif measure in GAUGES:
                    metric.set(measured)
                else:
                    for sample in measured:
                        metric.observe(sample)


def _once(metric_types: Mapping[Any, Any]) -> dict[Any, Any]:
    """Wrap the kinds of metrics so that a name that was made before gives the same metric."""
    made: dict[tuple[Any, str], Any] = {}

    def make(kind: Any, *args: Any, **kwargs: Any) -> Any:
        key = (kind, kwargs["name"] if "name" in kwargs else args[0])
        if key not in made:
            made[key] = metric_types[kind](*args, **kwargs)
        return made[key]

    return {kind: partial(make, kind) for kind in metric_types}


def _register(metric_types: Mapping[Any, Any], labelnames: list[str]) -> dict[str, Any]:
    """A metric for each measure, by its name; its last label is the tier or the tenant."""
    metrics = {}

    def register(kind: Any, name: str, what: str, label: Sequence[str] = (), **more: Any) -> None:
        metrics[name] = metric_types[kind](
            name=f"vllm:kvtiers_{name}",
            documentation=what,
            labelnames=[*labelnames, "tenant" if name in OF_TENANT else "tier", *label],
            **more,
        )

    for name, what in COUNTERS.items():
        register(Counter, name, what)
    for name, what in GAUGES.items():
        register(Gauge, name, what, multiprocess_mode="mostrecent")
    register(Gauge, STATE, STATE_MEANS, ["state"], multiprocess_mode="mostrecent")
    for name, (what, buckets) in HISTOGRAMS.items():
        register(Histogram, name, what, buckets=buckets)
    return metrics
