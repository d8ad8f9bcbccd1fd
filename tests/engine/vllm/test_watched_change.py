"""A real vLLM server takes back a change of its chain that made it worse, under traffic."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.engine.vllm.tiny_vllm import documents
from tests.engine.vllm.vllm_server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.faults]

PROMPTS = documents(8, 600)
"""Of 18 full blocks each; the engine's own 40 blocks keep two of them."""
WATCH = 20
"""Seconds."""


class Traffic(threading.Thread):
    """One client that asks for the prompts in a random order, and compares answers."""

    def __init__(self, server: VllmServer, expected: list[list[int]], seed: int) -> None:
        super().__init__(daemon=True)
        self.over = threading.Event()
        self.answered = 0
        self.wrong: list[int] = []
        self._server, self._expected, self._draw = server, expected, random.Random(seed)

    def run(self) -> None:
        while not self.over.is_set():
            number = self._draw.randrange(len(PROMPTS))
            if self._server.complete(PROMPTS[number], 4) != self._expected[number]:
                self.wrong.append(number)
            self.answered += 1


@contextmanager
def traffic(server: VllmServer, expected: list[list[int]]) -> Iterator[list[Traffic]]:
    clients = [Traffic(server, expected, seed) for seed in range(3)]
    for client in clients:
        client.start()
    try:
        yield clients
    finally:
        for client in clients:
            client.over.set()
        for client in clients:
            client.join()


def kvtiers(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("kvtiers")), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.fault
@pytest.mark.timeout(600)
def test_a_bad_chain_goes_back_by_itself(tiny_llama: Path, tmp_path: Path) -> None:
    """A chain that loads whatever it takes, from a tier that it slows down."""
    control = tmp_path / "control"
    disk = {"type": "disk", "capacity": "64MiB", "path": str(tmp_path / "disk")}
    good: dict[str, Any] = {
        "version": 1,
        "staging": "64MiB",
        "tiers": [disk],
        "control": {"folder": str(control)},
    }
    bad = {**good, "load_when": "always", "tiers": [{**disk, "load_rate": "2MB/s"}]}
    chains = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    for path, chain in zip(chains, (good, bad), strict=True):
        path.write_text(yaml.safe_dump(chain))
    server = VllmServer(tiny_llama, chains[0], tmp_path / "log", **{"kv-events-config": "{}"})
    try:
        expected = [server.complete(prompt, 4) for prompt in PROMPTS]
        with traffic(server, expected) as clients:
            time.sleep(WATCH + 1)
            ran = kvtiers("apply", chains[1], "--watch", f"{WATCH}s", "--folder", control)
        print(ran.stdout, ran.stderr, sum(client.answered for client in clients), "answers")
        status = kvtiers("status", "--json", "--folder", control)
    finally:
        server.close()
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "tier disk: changed" in ran.stdout
    *_, verdict = ran.stdout.splitlines()
    assert verdict.startswith("worse: ")
    assert verdict.endswith("the chain of before is in effect again")
    assert json.loads(status.stdout)["chain_version"] == 3
    assert [client.wrong for client in clients] == [[], [], []]
    assert min(client.answered for client in clients) > 0
