"""A real Prometheus scrapes a real engine whose tiers break: the alerts fire, and every query of
the dashboard has data."""

from __future__ import annotations

import itertools
import math
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.deploy.prometheus_server import RULES, Prometheus, binary, board_queries
from tests.engine.vllm.checkpoints import write_model
from tests.engine.vllm.tiny_vllm import LLAMA, documents
from tests.engine.vllm.vllm_server import VllmServer
from tests.support.damage import damage_blocks, keys_on
from tests.support.servers import RedisServer, binaries
from tiers.host.slots import slot_stride

pytestmark = [pytest.mark.vllm, pytest.mark.faults]

PROMPTS = documents(40, 600)
"""Of 18 full blocks each; the engine's own 40 blocks keep two of them."""
BLOCK_BYTES = 4 * 2 * 2 * 32 * 32 * 4
"""Layers, K and V, heads, their size, tokens per block, float32."""
PATIENCE = 120.0
"""Seconds after which what does not come is missing: protection from hanging."""
CAUSED = {
    ("KVTiersTierRefused", "everybodys"),
    ("KVTiersTierDegraded", "small"),
    ("KVTiersTierDown", "far"),
    ("KVTiersTierAbsent", "ssd"),
    ("KVTiersStoresDropped", "slow"),
    ("KVTiersWriteBudgetSpent", "spared"),
    ("KVTiersWaitSpent", "far"),
    ("KVTiersBlocksFail", "ssd"),
    ("KVTiersDamage", "ssd"),
    ("KVTiersTurnsOver", "cpu"),
}
"""Each alert that the fixture causes, and the tier that it breaks for it."""


class Watched(NamedTuple):
    """`first`: the alerts before anything broke but one folder; `fired`: all that fired since."""

    prometheus: Prometheus
    first: set[tuple[str, str]]
    fired: set[tuple[str, str]]


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 24 MiB."""
    place = tmp_path_factory.mktemp("small")
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m,mode=700", "none", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system can be mounted by root only")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, small_disk: Path) -> Iterator[Watched]:
    """A Prometheus, after all of `CAUSED` have fired or `PATIENCE` is over."""
    binary("prometheus")
    folder = tmp_path_factory.mktemp("watched")
    model = write_model(folder, LLAMA)
    with RedisServer(binaries()["valkey"]) as far:
        chain = _chain(folder, small_disk, far.url)
        server = VllmServer(model, chain, folder / "log")
        plain = _PlainEngine(server.page())
        try:
            targets = {"vllm": [server.address, plain.address]}
            with Prometheus(folder / "prometheus", targets) as prometheus:
                first = _until_compared(server, prometheus)
                fired = _break(server, folder / "ssd", far, prometheus)
                yield Watched(prometheus, first, fired)
        finally:
            plain.close()
            server.close()


def _chain(folder: Path, small_disk: Path, url: str) -> Path:
    """Tiers that break each in its way, in load priority."""
    (folder / "everybodys").mkdir()
    (folder / "everybodys").chmod(0o777)

    def disk(name: str, path: Path | None = None, **settings: Any) -> dict[str, Any]:
        path = path or folder / name
        return {"type": "disk", "name": name, "path": str(path), "capacity": "64MiB", **settings}

    tiers = [
        {"type": "cpu", "capacity": 3 * 18 * slot_stride(BLOCK_BYTES)},
        disk("ssd"),
        {"type": "redis", "name": "far", "url": url},
        disk("everybodys"),
        disk("small", small_disk / "tier"),
        disk("spared", write_budget="1MB/day"),
        disk("slow", store_rate="100KB/s", max_inflight="512KiB"),
    ]
    whole = {
        "version": 1,
        "load_when": "always",
        "load_policy": "first",
        "max_wait": "1s",
        "staging": "64MiB",
        "tiers": tiers,
        "ghosts": [{"tier": "cpu", "capacity": "2x"}],
    }
    path = folder / "chain.yaml"
    path.write_text(yaml.safe_dump(whole))
    return path


def _until_compared(server: VllmServer, prometheus: Prometheus) -> set[tuple[str, str]]:
    """The alerts once the engines have been compared, which takes longest."""
    deadline = time.monotonic() + PATIENCE
    while not any(name == "KVTiersTierAbsent" for name, _ in prometheus.firing()):
        assert time.monotonic() < deadline
        server.complete([5, 6, 7], 1)
        time.sleep(0.2)
    return prometheus.firing()


def _break(
    server: VllmServer, damaged: Path, far: RedisServer, prometheus: Prometheus
) -> set[tuple[str, str]]:
    """Send requests, damage the blocks of a tier and let another hang now and then until both are
    noticed, then kill that; the alerts that fire meanwhile."""
    fired: set[tuple[str, str]] = set()
    hit: set[bytes] = set()
    rounds = itertools.cycle(range(len(PROMPTS)))
    deadline = time.monotonic() + PATIENCE
    while not fired >= CAUSED and time.monotonic() < deadline:
        number = next(rounds)
        hangs = ("KVTiersWaitSpent", "far") not in fired
        far.hang() if hangs else far.kill()
        server.complete(PROMPTS[number], 4)
        if hangs:
            far.resume()
        known = set(keys_on(damaged))
        damage_blocks(damaged, (known - hit).__contains__)  # once: twice would mend it
        hit |= known
        server.complete(PROMPTS[number - 3], 4, tiers=["ssd"])
        server.complete(PROMPTS[number - 6], 4)
        fired |= prometheus.firing()
    return fired


class _PlainEngine:
    """An engine beside it that was started without the chain: its page without our metrics."""

    def __init__(self, page: str) -> None:
        shown = "".join(line for line in page.splitlines(keepends=True) if "kvtiers" not in line)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(shown.encode())

            def log_message(self, format: str, *args: object) -> None:
                """Nobody reads it."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_what_breaks_fires_its_alert(watched: Watched) -> None:
    assert CAUSED - watched.fired == set()


def test_nothing_fires_for_what_works(watched: Watched) -> None:
    at_first = {"KVTiersTierRefused", "KVTiersTierDegraded", "KVTiersTierAbsent"}
    assert {name for name, _ in watched.first} == at_first
    states = {"KVTiersTierRefused", "KVTiersTierDegraded", "KVTiersTierDown"}
    broken = {pair for pair in watched.fired if pair[0] in states}
    assert broken == {pair for pair in CAUSED if pair[0] in states}
    assert {tier for name, tier in watched.fired if name == "KVTiersDamage"} == {"ssd"}
    assert {tier for name, tier in watched.fired if name == "KVTiersWriteBudgetSpent"} == {"spared"}


def _queries() -> dict[str, str]:
    """What the dashboard and the rules ask, with its choices made."""
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    recorded = {rule["record"]: rule["record"] for rule in group["rules"] if "record" in rule}
    return board_queries() | recorded


def test_each_query_has_data(watched: Watched) -> None:
    answers = {name: watched.prometheus.query(query) for name, query in _queries().items()}
    assert len(answers) > 40
    empty = {name for name, found in answers.items() if all(math.isnan(v) for _, v in found)}
    assert empty == set()
