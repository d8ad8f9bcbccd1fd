"""A real vLLM server's chain follows its traffic: what it recorded leads to advice, the advice to a
change, the change to a verdict; and a change for the worse is taken back."""

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

from spec.load import load_chain
from tests.engine.vllm.tiny_vllm import documents
from tests.engine.vllm.vllm_server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.faults]

PROMPTS = documents(8, 600)
"""Of 18 full blocks each; the engine's own 40 blocks keep two of them."""
WATCH = 20
"""Seconds."""
FEW = 3
"""Documents that are asked for at first: what the disk tier has room for."""
REQUESTS = 140
"""Of few documents, at least: three times as many in all are enough for advice."""


class Traffic(threading.Thread):
    """One client that asks for some of the prompts in a random order, and compares answers."""

    def __init__(self, server: VllmServer, expected: list[list[int]], seed: int) -> None:
        super().__init__(daemon=True)
        self.over = threading.Event()
        self.answered = 0
        self.some = FEW
        self.wrong: list[int] = []
        self._server, self._expected, self._draw = server, expected, random.Random(seed)

    def run(self) -> None:
        while not self.over.is_set():
            number = self._draw.randrange(self.some)
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


def until_recorded(server: VllmServer, requests: int) -> int:
    """Wait for so many requests; how many there are then, which may come by hundreds a second."""
    end = time.monotonic() + 300
    while (found := recorded(server)) < requests:
        assert time.monotonic() < end, "so many requests do not come"
        time.sleep(0.2)
    return found


def recorded(server: VllmServer) -> int:
    return int(server.metrics()["vllm:kvtiers_recorded_requests_total"]["(chain)"])


def watched(chain: Path, control: Path) -> tuple[int, list[str]]:
    """The status of `apply --watch`, and what it said."""
    ran = kvtiers("apply", chain, "--watch", f"{WATCH}s", "--folder", control)
    print(ran.stdout, ran.stderr)
    return ran.returncode, ran.stdout.splitlines()


@pytest.mark.fault
@pytest.mark.timeout(900)
def test_advice_is_followed_and_a_bad_chain_goes_back(tiny_llama: Path, tmp_path: Path) -> None:
    """Later there are more documents than the disk tier has room for: it is to be larger. Then
    comes a chain that loads whatever it takes, from a tier that it slows down."""
    control, new, bad = tmp_path / "control", tmp_path / "new.yaml", tmp_path / "bad.yaml"
    chain: dict[str, Any] = {
        "version": 1,
        "staging": "64MiB",
        "tiers": [{"type": "disk", "capacity": "4MiB", "path": str(tmp_path / "disk")}],
        "record": {"path": str(tmp_path / "trace")},
        "control": {"folder": str(control)},
    }
    old = tmp_path / "old.yaml"
    old.write_text(yaml.safe_dump(chain))
    server = VllmServer(tiny_llama, old, tmp_path / "log", **{"kv-events-config": "{}"})
    try:
        expected = [server.complete(prompt, 4) for prompt in PROMPTS]
        with traffic(server, expected) as clients:
            of_few = until_recorded(server, REQUESTS)
            for client in clients:
                client.some = len(PROMPTS)
            until_recorded(server, 3 * of_few)  # a choice sees the first 0.6 of them
            options = ["--folder", control, "--chains", 40, "--processes", 1, "--output", new]
            advice = kvtiers("recommend", *options)
            print(advice.stdout, advice.stderr)
            assert advice.returncode == 0 and "\nChange: disk " in advice.stdout
            followed = yaml.safe_load(new.read_text())
            followed_status, followed_said = watched(new, control)
            slow = {**followed["tiers"][0], "load_rate": "2MB/s"}
            bad.write_text(yaml.safe_dump({**followed, "load_when": "always", "tiers": [slow]}))
            bad_status, bad_said = watched(bad, control)
        print(sum(client.answered for client in clients), "answers")
        status = kvtiers("status", "--json", "--folder", control)
    finally:
        server.close()
    assert load_chain(new).tiers[0].capacity_bytes > 8 << 20
    assert followed_status == 0 and followed_said[0].startswith("tier disk: resized")
    assert followed_said[-1].startswith(("better: ", "same: "))
    assert bad_status == 1 and bad_said[0].startswith("tier disk: changed")
    assert bad_said[-1].startswith("worse: ")
    assert bad_said[-1].endswith("the chain of before is in effect again")
    assert json.loads(status.stdout)["chain_version"] == 4
    assert [client.wrong for client in clients] == [[], [], []]
    assert min(client.answered for client in clients) > 0
