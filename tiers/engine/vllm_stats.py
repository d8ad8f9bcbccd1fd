"""What the tiers count, in the clothes vLLM expects: its log line and its Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from tiers.connector.stats import COUNTERS, TierStats, add_counters
from tiers.engine.vllm_children import child_configs, made_by

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass
class MultiKVConnectorStats(KVConnectorStats):  # type: ignore[misc]
    """Stats of an interval by name: a tier's counters, or another connector's own stats object.

    `makers`: for each of those, where its class is found; a tier of a child is `child/tier`.
    """

    data: dict[str, Any] = field(default_factory=dict)
    makers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, name: str, stats: Any, maker: dict[str, Any] | None) -> None:
        """Take in what one child counted."""
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
        for counters in self._tiers().values():
            counters.clear()

    def aggregate(self, other: KVConnectorStats) -> MultiKVConnectorStats:
        for name, theirs in other.data.items():
            ours = self.data.get(name)
            if ours is None:
                self.data[name] = dict(theirs) if isinstance(theirs, dict) else theirs
            elif isinstance(theirs, dict):
                add_counters(ours, theirs)
            else:
                self.data[name] = ours.aggregate(theirs)
        self.makers.update(getattr(other, "makers", {}))
        return self

    def reduce(self) -> dict[str, Any]:
        """For a log line: `{"disk.loaded_tokens": 896, ...}`, and another's own by its name."""
        line: dict[str, Any] = dict(TierStats(self._tiers()).reduce())
        line.update({name: stats.reduce() for name, stats in self._others()})
        return line

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
        return self.data[name]

    def _tiers(self) -> dict[str, dict[str, float]]:
        return {name: one for name, one in self.data.items() if isinstance(one, dict)}

    def _others(self) -> list[tuple[str, KVConnectorStats]]:
        return [(name, one) for name, one in self.data.items() if not isinstance(one, dict)]


def rebuild(data: Mapping[str, Any] | None) -> MultiKVConnectorStats:
    """Stats from what `to_dict` made, or from live objects, or from both.

    Takes vLLM's own form too, in which a name is that of a registered connector; raises
    ValueError for one that is none. A connector without stats of its own kind is left out.
    """
    whole = MultiKVConnectorStats()
    for name, value in (data or {}).items():
        if isinstance(value, KVConnectorStats):
            whole.data[name] = value
        elif all(isinstance(count, int | float) for count in value.values()):
            whole.data[name] = dict(value)
        elif (stats := _rebuild_other(name, value)) is not None:
            maker = {key: one for key, one in value.items() if key != "stats"}
            whole.add(name, stats, maker if "kv_connector" in value else None)
    return whole


def _rebuild_other(name: str, value: Mapping[str, Any]) -> Any:
    if "kv_connector" in value:
        maker = {key: one for key, one in value.items() if key != "stats"}
        return made_by(maker).build_kv_connector_stats(data=value["stats"])
    cls = KVConnectorFactory.get_connector_class_by_name(name)
    return cls.build_kv_connector_stats(data=value)


class KVTiersPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:kvtiers_<counter>{tier="<name>"}` beside vLLM's own metrics, registered once.

    The prefix is vLLM's because its offline `get_metrics` shows no others. Other connectors'
    metrics are made by their classes, once per class.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: metric_types[Counter](
                name=f"vllm:kvtiers_{name}", documentation=what, labelnames=[*labelnames, "tier"]
            )
            for name, what in COUNTERS.items()
        }
        self._others: dict[str, KVConnectorPromMetrics] = {}
        classes: dict[type[Any], KVConnectorPromMetrics] = {}
        for child in child_configs(vllm_config):
            if child.cls.__name__ == "KVTiersConnector":
                continue
            if child.cls not in classes:
                classes[child.cls] = child.cls.build_prom_metrics(
                    child.vllm_config, metric_types, labelnames, per_engine_labelvalues
                )
            self._others[child.name] = classes[child.cls]

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if "kv_connector" in value:
                other = self._others.get(name)
                if other is not None:
                    other.observe(value["stats"], engine_idx)
                continue
            for counter, count in value.items():
                self._counters[counter].labels(*labels, name).inc(count)
