"""Write the Grafana dashboard beside this file: `python -m deploy.grafana.dashboard`.

A panel is its title, its unit and its queries, each with the legend of its series. `{}` in a query
is where the dashboard's own choice of engines and tiers goes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).with_name("kvtiers.json")
ENGINES = 'model_name=~"$model", instance=~"$instance"'
TIERS = f'{ENGINES}, tier=~"$tier"'
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT, COLUMNS = 8, 7, 3
TIMELINE = "state-timeline"


class Panel(NamedTuple):
    """`queries`: each with its legend. `kind`: of Grafana's panels. `says`: what to look for."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    says: str = ""
    kind: str = "timeseries"
    stacked: bool = False
    logarithmic: bool = False


def rate(name: str, by: str = "tier", among: str = TIERS) -> str:
    """A counter's increase a second, as a sum for each of some labels."""
    return f"sum by ({by}) (rate(vllm:{name}{{{among}}}[$__rate_interval]))"


def quantiles(name: str, among: str = TIERS) -> tuple[tuple[str, str], ...]:
    """The median of a histogram and its 99th percentile, by tier where it has tiers."""
    by, legend = ("le, tier", "{{tier}} ") if among == TIERS else ("le", "")
    buckets = rate(f"{name}_bucket", by, among)
    return tuple(
        (f"histogram_quantile({q}, {buckets})", f"{legend}p{q[2:]:0<2}") for q in ("0.5", "0.99")
    )


def gauge(name: str, how: str = "sum") -> str:
    """A gauge of all chosen engines, by tier."""
    return f"{how} by (tier) (vllm:kvtiers_{name}{{{TIERS}}})"


def used_once() -> str:
    """Bytes held, by tier: where engines of one address share a place, not once for each."""
    used, of = f"vllm:kvtiers_used_bytes{{{TIERS}}}", "by (instance, model_name, tier)"
    shared = f"max {of} ({used} and vllm:kvtiers_shared{{{TIERS}}} == 1)"
    return f"sum by (tier) ({shared} or sum {of} ({used}))"


PROMPTS = rate("prompt_tokens_total", "job", ENGINES)
LOADED = rate("kvtiers_loaded_tokens_total")
DROPS = {
    "no_slot": "no slot",
    "inflight": "max_inflight",
    "budget": "write_budget",
    "down": "down",
}
FAILURES = ("tier_failures", "load_failures", "store_failures", "damaged_blocks")

PANELS = (
    Panel(
        "State of each tier",
        "",
        (
            (
                f"max by (instance, engine, tier, state) (vllm:kvtiers_tier_state{{{TIERS}}}) == 1",
                "{{instance}} {{engine}} {{tier}}: {{state}}",
            ),
        ),
        "Any but open and detached has an alert. It stands still while an engine has no requests.",
        TIMELINE,
    ),
    Panel(
        "Alerts",
        "",
        (
            (
                'ALERTS{alertname=~"KVTiers.*", alertstate="firing"}',
                "{{alertname}} {{instance}} {{tier}}",
            ),
        ),
        "Sections of docs/runbook.md have the alerts' names.",
        TIMELINE,
    ),
    Panel(
        "Time to first token",
        "s",
        quantiles("time_to_first_token_seconds", ENGINES),
    ),
    Panel(
        "Where prompt tokens come from",
        "percentunit",
        (
            (
                f"sum({rate('prefix_cache_hits_total', 'job', ENGINES)}) / sum({PROMPTS})",
                "the engine's own cache",
            ),
            (f"{LOADED} / on () group_left () sum({PROMPTS})", "{{tier}}"),
        ),
        "The rest is computed.",
        stacked=True,
    ),
    Panel(
        "Tokens loaded",
        "short",
        (
            (LOADED, "{{tier}}"),
            (rate("kvtiers_reloaded_tokens_total"), "{{tier}} after a preemption"),
        ),
        "A second.",
    ),
    Panel(
        "Requests that a tier serves",
        "percentunit",
        ((f"{rate('kvtiers_hits_total')} / {rate('kvtiers_lookups_total')}", "{{tier}}"),),
        "Of those that looked it up.",
    ),
    Panel(
        "Fill",
        "percentunit",
        ((f"{gauge('used_bytes')} / ({gauge('capacity_bytes')} > 0)", "{{tier}}"),),
        "A full tier is no fault: see how long blocks stay. A server tells its fill itself.",
    ),
    Panel(
        "Bytes held",
        "bytes",
        (
            (gauge("used_bytes"), "{{tier}}"),
            (f"{gauge('capacity_bytes')} > 0", "{{tier}} capacity"),
        ),
        "Engines that share a folder each show all of it.",
    ),
    Panel(
        "How long a block stays",
        "s",
        (
            (
                f"({used_once()} > 0) / ({rate('kvtiers_stored_bytes_total')} > 0)",
                "{{tier}}",
            ),
        ),
        "In a full tier. Below the time until users come back it serves little. Of several servers "
        "that share a folder choose all, and divide by their number.",
    ),
    Panel("Blocks evicted", "short", ((rate("kvtiers_evictions_total"), "{{tier}}"),), "A second."),
    Panel("Loaded", "Bps", ((rate("kvtiers_loaded_bytes_total"), "{{tier}}"),)),
    Panel("Stored", "Bps", ((rate("kvtiers_stored_bytes_total"), "{{tier}}"),)),
    Panel(
        "Loading beside computing, as measured",
        "short",
        (
            (gauge("load_tokens_per_second", "avg"), "{{tier}} loads"),
            (
                # 0 is not measured yet, or of a tier that has left.
                f"avg(vllm:kvtiers_prefill_tokens_per_second{{{TIERS}}} > 0)",
                "the engine computes",
            ),
        ),
        "Tokens a second. A tier below the engine's line is left out by load_when: sooner.",
        logarithmic=True,
    ),
    Panel(
        "Time of a load on a rank",
        "s",
        (
            *quantiles("kvtiers_load_seconds"),
            (gauge("load_engine_seconds", "avg"), "{{tier}} the engine beside it, at the least"),
        ),
    ),
    Panel("Time of a store on a rank", "s", quantiles("kvtiers_store_seconds")),
    Panel(
        "Time of a look-up",
        "s",
        quantiles("kvtiers_lookup_seconds"),
        "Until the tier answered.",
    ),
    Panel(
        "Until a step notices the answer",
        "s",
        quantiles("kvtiers_lookup_notice_seconds"),
        "Long steps of the engine raise it, no tier does.",
    ),
    Panel(
        "Bytes in flight",
        "bytes",
        ((gauge("loading_bytes"), "{{tier}} loads"), (gauge("storing_bytes"), "{{tier}} stores")),
    ),
    Panel(
        "Blocks dropped",
        "short",
        tuple(
            (rate(f"kvtiers_store_dropped_{name}_total"), f"{{{{tier}}}} {why}")
            for name, why in DROPS.items()
        ),
        "A second, by what was short.",
    ),
    Panel(
        "Waits in vain",
        "short",
        (
            (rate("kvtiers_lookup_timeouts_total"), "{{tier}} look-ups"),
            (rate("kvtiers_load_timeouts_total"), "{{tier}} loads"),
            (rate("kvtiers_recompute_preferred_total"), "{{tier}} computed, sooner"),
            (rate("kvtiers_recompute_preferred_engine_total"), "{{tier}} too short to load"),
            (rate("kvtiers_recompute_late_total"), "{{tier}} longer than max_wait"),
        ),
        "A second.",
    ),
    Panel(
        "Failures",
        "short",
        tuple(
            (rate(f"kvtiers_{name}_total"), f"{{{{tier}}}} {name.replace('_', ' ')}")
            for name in FAILURES
        ),
        "A second. Damaged blocks are never served.",
    ),
    Panel(
        "Prefill saved",
        "short",
        (
            (
                f"{rate('kvtiers_tenant_prefill_seconds_total', 'tenant', ENGINES)} - "
                f"{rate('kvtiers_tenant_load_seconds_total', 'tenant', ENGINES)}",
                "{{tenant}}",
            ),
        ),
        "Seconds of computing a second, less those that requests waited for loads.",
    ),
    Panel(
        "Ghosts: hits with other settings",
        "percentunit",
        (
            (
                f"avg by (tier) (vllm:kvtiers_ghost_hit_ratio{{{ENGINES}}})",
                "{{tier}}",
            ),
        ),
        "Empty where the chain sets no ghosts. Compare a ghost with its tier here.",
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana 10 and later import it."""
    return {
        "uid": "kvtiers",
        "title": "kvtiers",
        "description": "Tiers of KV cache under vLLM. Needs a Prometheus that scrapes /metrics.",
        "tags": ["kvtiers", "vllm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": list(_variables())},
        "panels": [_panel(place, panel) for place, panel in enumerate(PANELS)],
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "type": "datasource", "query": "prometheus"}
    chosen = ""
    for name, label in (("model", "model_name"), ("instance", "instance"), ("tier", "tier")):
        yield {
            "name": name,
            "type": "query",
            "datasource": DATASOURCE,
            "query": f"label_values(vllm:kvtiers_tier_state{{{chosen}}}, {label})",
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }
        chosen += f'{", " if chosen else ""}{label}=~"${name}"'


def _panel(place: int, panel: Panel) -> dict[str, Any]:
    down, across = divmod(place, COLUMNS)
    drawn: dict[str, Any] = {"fillOpacity": 10, "axisSoftMin": 0}
    options: dict[str, Any] = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    if panel.stacked:
        drawn = {"fillOpacity": 40, "axisSoftMin": 0, "stacking": {"mode": "normal", "group": "A"}}
    if panel.logarithmic:
        drawn = {"scaleDistribution": {"type": "log", "log": 10}}
    if panel.kind == TIMELINE:
        drawn = {"fillOpacity": 70}
        options |= {"showValue": "never", "rowHeight": 0.8, "mergeValues": True}
    return {
        "id": place + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.says,
        "datasource": DATASOURCE,
        "gridPos": {"x": across * WIDTH, "y": down * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "custom": drawn},
            "overrides": [],
        },
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": DATASOURCE,
                "expr": query,
                "legendFormat": legend,
            }
            for number, (query, legend) in enumerate(panel.queries)
        ],
    }


def text() -> str:
    """The file: a line for each panel, so that a change of one is a change of a line."""
    whole = dashboard()
    panels = ",\n".join(json.dumps(panel) for panel in whole.pop("panels"))
    return f'{json.dumps(whole, indent=1)[:-2]},\n "panels": [\n{panels}\n ]\n}}\n'


if __name__ == "__main__":
    FILE.write_text(text())
