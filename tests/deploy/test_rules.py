"""The rules are right by promtool, and each alert has its section in the runbook and its cause."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from tests.deploy.prometheus_server import (
    DEPLOY,
    RULES,
    alerts,
    board_queries,
    hurried,
    promtool,
)
from tests.deploy.test_watched import CAUSED
from tiers.contract.stats import COUNTERS, GAUGES, HISTOGRAMS, STATE

ROOT = DEPLOY.parent
SERIES = Path(__file__).with_name("rules_test.yaml")


def test_promtool_takes_the_rules_and_the_configuration() -> None:
    assert "SUCCESS" in promtool("check", "rules", RULES)
    assert "SUCCESS" in promtool("check", "config", DEPLOY / "prometheus" / "prometheus.yaml")


def test_alerts_that_take_hours_fire_by_series() -> None:
    assert "SUCCESS" in promtool("test", "rules", SERIES)


def test_the_dashboard_tells_of_a_shared_folder_what_the_rule_does(tmp_path: Path) -> None:
    """Of the same series."""
    told = yaml.safe_load(SERIES.read_text())["tests"]
    (case,) = (one for one in told if one["name"].startswith("engines that share a folder"))
    (rule,) = case["promql_expr_test"]
    rule["expr"] = f"round({board_queries()['How long a block stays: {{tier}}']})"
    rule["exp_samples"] = [{"labels": f'{{tier="{t}"}}', "value": 400} for t in ("ssd", "cpu")]
    del case["alert_rule_test"]
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"tests": [case]}))
    assert "SUCCESS" in promtool("test", "rules", tmp_path / "test.yaml")


def test_each_alert_fires_in_a_test() -> None:
    told = yaml.safe_load(SERIES.read_text())["tests"]
    by_series = {
        rule["alertname"]
        for test in told
        for rule in test.get("alert_rule_test", ())
        if rule["exp_alerts"]
    }
    assert {name for name, _ in CAUSED} | by_series == alerts().keys()


def test_each_alert_links_its_section_of_the_runbook() -> None:
    page = (ROOT / "docs" / "runbook.md").read_text()
    sections = re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    assert [name for name, _ in sections] == list(alerts())
    for name, text in sections:
        assert re.findall(r"^\*\*(.*?)\*\*: ", text, re.M) == ["Means", "Look at", "Do"], name
    links = {name: rule["annotations"]["runbook"] for name, rule in alerts().items()}
    assert links == {name: f"docs/runbook.md#{name.lower()}" for name in alerts()}


def test_metrics_that_pages_and_rules_name_exist() -> None:
    ours = {f"{name}_total" for name in COUNTERS} | GAUGES.keys() | {STATE} | HISTOGRAMS.keys()
    ours |= {f"hosted_{STATE}"} | {
        f"{name}_{part}" for name in HISTOGRAMS for part in ("count", "sum", "bucket")
    }
    files = [RULES, DEPLOY / "grafana" / "kvtiers.json", ROOT / "docs" / "runbook.md"]
    for file in files:
        named = set(re.findall(r"vllm:kvtiers_(\w+)", file.read_text()))
        assert named and named <= ours, file


def test_a_hurry_changes_times_alone() -> None:
    assert hurried("rate(a:rate10m[10m]) offset 1h") == "rate(a:rate10m[6000ms]) offset 36000ms"
    assert hurried("> 600 and 1d") == "> 600 and 864000ms"
