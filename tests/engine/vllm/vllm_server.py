"""vLLM's OpenAI server over a chain of tiers, in a process of its own, and what it shows."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from tests.engine.vllm.imported import Program
from tests.engine.vllm.tiny_vllm import BLOCK_TOKENS
from tests.support.servers import free_port

START_LIMIT = 240.0
"""Seconds after which a server that does not answer is given up: protection from hanging."""
SETTLE_LIMIT = 60.0
"""Seconds after which a transfer that does not end is given up."""
API_SERVER = "vllm.entrypoints.openai.api_server"
SAMPLE = re.compile(r"^(\S+?)\{(.*)\} (\S+)$")


class VllmServer:
    """A running server; `close` ends it. `events` gathers what it has published."""

    def __init__(
        self,
        model: Path,
        chain: Path,
        log: Path,
        jobs: subprocess.Popen[str] | None = None,
        /,
        **options: Any,
    ) -> None:
        """`jobs`: the process that it is a fork of, else it imports all itself. `options` of the
        command line by name; None: it takes no value."""
        self.model = model
        self._options = options
        self.log = log
        self.events: list[dict[str, Any]] = []
        self.reported: dict[str, Any] | None = None
        """The transfer parameters of the last response."""
        self._port = free_port()
        self._context = zmq.Context()
        # The publisher connects to whom an address names: so the listener is there before it.
        socket = self._context.socket(zmq.SUB)
        socket.subscribe(b"")
        self._events_port = socket.bind_to_random_port("tcp://127.0.0.1")
        threading.Thread(target=self._listen, args=(socket,), daemon=True).start()
        config = subprocess.run(
            [str(Path(sys.executable).with_name("kvtiers")), "config", str(chain)],
            check=True,
            capture_output=True,
            text=True,
        )
        env = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOG_STATS_INTERVAL": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # for resets by HTTP
        }
        arguments = self._arguments(config.stdout)
        with log.open("w") as file:
            self._process = (
                subprocess.Popen(
                    [sys.executable, "-m", API_SERVER, *arguments],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=env,
                )
                if jobs is None
                else Program(jobs, API_SERVER, env, arguments, errors=True, log=log)
            )
        self._wait_until_it_answers()

    @property
    def address(self) -> str:
        """Its host and port."""
        return f"127.0.0.1:{self._port}"

    def _arguments(self, transfer: str) -> list[str]:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://127.0.0.1:{self._events_port}",
        }
        options: dict[str, Any] = {
            "model": self.model,
            "host": "127.0.0.1",
            "port": self._port,
            "dtype": "float32",
            "block-size": BLOCK_TOKENS,
            "max-model-len": 1024,
            "num-gpu-blocks-override": 40,
            "kv-transfer-config": transfer,
            "kv-events-config": json.dumps(events),
        }
        options |= self._options
        named = [
            f"--{name}" if value is None else f"--{name}={value}" for name, value in options.items()
        ]
        return [*named, "--skip-tokenizer-init", "--enforce-eager"]

    def _listen(self, socket: zmq.Socket[bytes]) -> None:
        with socket, contextlib.suppress(zmq.ContextTerminated):
            while True:
                *_, batch = socket.recv_multipart()
                self.events += msgspec.msgpack.decode(batch)[1]

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + START_LIMIT
        while True:
            try:
                self._get("/health")
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.close()
                    raise RuntimeError(f"no server: {self.log.read_text()[-6000:]}") from None
                time.sleep(0.2)

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=60) as answer:
            return str(answer.read().decode())

    def complete(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        replica: int | None = None,
        tiers: Sequence[str] | None = None,
    ) -> list[int]:
        """The tokens that the server answers, from one of its data-parallel replicas, having loaded
        from some tiers alone."""
        body: dict[str, Any] = {
            "model": str(self.model),
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if tiers is not None:
            body["kv_transfer_params"] = {"kvtiers": {"tiers": list(tiers)}}
        headers = {} if replica is None else {"X-data-parallel-rank": str(replica)}
        response = self.post("/v1/completions", body, headers)
        self.reported = response["kv_transfer_params"]
        choice = response["choices"][0]
        return [int(token) for token in choice["token_ids"]]

    def post(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        """What the server answers to a POST."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **(headers or {})},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def settle(self, *replicas: int) -> None:
        """Let steps of all `replicas` tell of all transfers; they are of requests too short to have
        a block."""
        deadline = time.monotonic() + SETTLE_LIMIT
        while True:
            for replica in replicas or (None,):
                self.complete([5, 6, 7], 1, replica)
            metrics = self.metrics()
            in_flight = [metrics[f"vllm:kvtiers_{verb}_jobs"] for verb in ("loading", "storing")]
            if all(jobs and not any(jobs.values()) for jobs in in_flight):
                return
            assert time.monotonic() < deadline, "transfers do not end"

    def page(self) -> str:
        """`/metrics` as it is."""
        return self._get("/metrics")

    def metrics(self) -> dict[str, dict[str, float]]:
        """All of `/metrics` but the buckets of histograms, of all replicas together: name, tier (or
        nothing) to value."""
        found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for line in self.page().splitlines():
            sample = SAMPLE.match(line)
            if sample and not sample[1].endswith("_bucket"):
                tier = re.search(r'tier="(.*?)"', sample[2])
                found[sample[1]][tier[1] if tier else ""] += float(sample[3])
        return found

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        try:
            self._process.wait(60)
        except (subprocess.TimeoutExpired, TimeoutError):
            self._process.kill()
            self._process.wait()
        self._context.term()
