"""A real Prometheus for tests: Debian's package `prometheus`, if it is on PATH or in the folder
that the variable PROMETHEUS names."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.servers import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "kvtiers.rules.yaml"
START_LIMIT = 60.0
"""Seconds after which a server that does not answer is given up: protection from hanging."""
MINUTE_MS = 600
"""Milliseconds that stand for a minute of the rules."""


def binary(name: str) -> str:
    """The path of `prometheus` or `promtool`; skips the test where it is not installed."""
    found = shutil.which(name, path=os.environ.get("PROMETHEUS")) or shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: install Debian's package prometheus, or set PROMETHEUS=FOLDER")
    return found


def promtool(*arguments: str | Path) -> str:
    """What promtool prints; a failure has it in its message."""
    done = subprocess.run(
        [binary("promtool"), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def alerts() -> dict[str, dict[str, Any]]:
    """The alerts by name."""
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"] if "alert" in rule}


def board_queries() -> dict[str, str]:
    """What the dashboard asks, with its choices made, by panel and legend."""
    board = json.loads((DEPLOY / "grafana" / "kvtiers.json").read_text())
    chosen = {"$__rate_interval": "2m", "$model": ".*", "$instance": ".*", "$tier": ".*"}
    found = {}
    for panel in board["panels"]:
        for target in panel["targets"]:
            query = target["expr"]
            for variable, value in chosen.items():
                query = query.replace(variable, value)
            found[f"{panel['title']}: {target['legendFormat']}"] = query
    return found


def hurried(rules: str) -> str:
    """The rules with `MINUTE_MS` for each minute."""
    minutes = {"m": 1, "h": 60, "d": 60 * 24}
    return re.sub(
        r"\b(\d+)([mhd])\b",
        lambda found: f"{int(found[1]) * minutes[found[2]] * MINUTE_MS}ms",
        rules,
    )


class Prometheus:
    """A server with our rules in a hurry; use it as a context manager."""

    def __init__(self, folder: Path, targets: Mapping[str, Sequence[str]]) -> None:
        """`targets`: addresses to scrape, by job."""
        self._address = f"127.0.0.1:{free_port()}"
        folder.mkdir()
        (folder / "rules.yaml").write_text(hurried(RULES.read_text()))
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = ["rules.yaml"]
        config["scrape_configs"] = [
            {"job_name": job, "static_configs": [{"targets": list(addresses)}]}
            for job, addresses in targets.items()
        ]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self._log = (folder / "log").open("w+")
        self._process = subprocess.Popen(
            [
                binary("prometheus"),
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self._address}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> Prometheus:
        deadline = time.monotonic() + START_LIMIT
        while True:
            try:
                self.ask("query", query="1")
                return self
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self._log.seek(0)
                    raise RuntimeError(f"no Prometheus: {self._log.read()[-3000:]}") from None
                time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def ask(self, verb: str, **parameters: str) -> Any:
        """The data of an answer of its API. Raises OSError with what it says to a bad query."""
        url = f"http://{self._address}/api/v1/{verb}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise OSError(f"{error}: {error.read().decode()}") from None

    def query(self, query: str) -> list[tuple[dict[str, str], float]]:
        """The labels and values of an instant query."""
        found = self.ask("query", query=query)["result"]
        return [(one["metric"], float(one["value"][1])) for one in found]

    def firing(self) -> set[tuple[str, str]]:
        """Each alert that fires now, and its tier."""
        found = self.query('ALERTS{alertstate="firing"}')
        return {(labels["alertname"], labels["tier"]) for labels, _ in found if "tier" in labels}
