"""Prefill and decode apart: two engines, of which one pulls the KV of prompts from the other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.apart import TO_PREFILL
from tests.engine.conftest import do_job
from tests.engine.vllm.tiny_vllm import BLOCK_TOKENS
from tests.support.servers import free_port

START_LIMIT = 240.0
"""Seconds after which an engine that does not answer is given up: protection from hanging."""


def over_tcp() -> dict[str, str]:
    """The environment of one node: all of NIXL on loopback."""
    return {
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": "lo",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


class Node:
    """An engine in a process of its own, which is asked one question at a time."""

    def __init__(
        self,
        jobs: subprocess.Popen[str],
        model: Path,
        at: Path,
        transfer: Mapping[str, Any],
        blocks: int,
        tokens: int,
        more: Mapping[str, Any] = {},
    ) -> None:
        """`at`: its socket and log without their endings. `transfer`: its KV transfer config.
        `blocks`: of its paged KV. `tokens`: of the longest request. `more`: of its settings."""
        engine = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "block_size": BLOCK_TOKENS,
            "max_model_len": tokens,
            "num_gpu_blocks_override": blocks,
            "enforce_eager": True,
            "disable_log_stats": False,
            "kv_transfer_config": dict(transfer),
            **more,
        }
        self._open = contextlib.ExitStack()
        self._made = jobs, model, at, transfer, blocks, tokens, more
        self.log = at.with_suffix(".log")
        self._path = at.with_suffix(".sock")
        self._path.unlink(missing_ok=True)
        job = {"engine": engine, "env": over_tcp(), "log": str(self.log)}
        self._process = int(do_job(jobs, {**job, "serves": str(self._path)}))

    def wait_until_it_runs(self) -> None:
        deadline = time.monotonic() + START_LIMIT
        while not (self._path.exists() or self._has_ended()):
            assert time.monotonic() < deadline, self.log.read_text()[-6000:]
            time.sleep(0.1)

    def connect(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + START_LIMIT
        end = self._open.enter_context(socket.socket(socket.AF_UNIX))
        while True:
            try:
                end.connect(str(self._path))
                break
            except OSError:
                late = time.monotonic() > deadline or self._has_ended()
                assert not late, self.log.read_text()[-6000:]
                time.sleep(0.1)
        self._lines = self._open.enter_context(end.makefile("rw"))

    def _has_ended(self) -> bool:
        """Who forked it does not wait for it."""
        return Path(f"/proc/{self._process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"

    def _asked(self, question: Mapping[str, Any]) -> Any:
        print(json.dumps(question), file=self._lines, flush=True)
        line = self._lines.readline()
        assert line, f"the engine ended: {self.log.read_text()[-6000:]}"
        return json.loads(line)

    def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        params: Mapping[str, Any],
        adapter: Path | None = None,
    ) -> dict[str, Any]:
        """Its tokens, and what else a response has; `params`: transfer parameters. `adapter`: the
        folder of a LoRA adapter."""
        more: dict[str, Any] = {"sampling": {"extra_args": {"kv_transfer_params": params}}}
        if adapter is not None:
            more["adapter"] = str(adapter)
        answer: dict[str, Any] = self._asked({"ask": [prompt, max_tokens, more]})
        return answer

    def measured(self, *names: str) -> dict[str, Any]:
        """Once its stores have ended: the tiers' counters, and `total` of the engine's own."""
        found: dict[str, Any] = self._asked({"total": names})
        return found

    def shared_memory(self) -> set[str]:
        """The files of /dev/shm that it has mapped and that have a name."""
        lines = Path(f"/proc/{self._process}/maps").read_text().splitlines()
        names = (line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line)
        return {name for name in names if not name.endswith("(deleted)")}

    def again(self) -> Node:
        """Begin another in its place. Its log begins anew."""
        return Node(*self._made)

    def kill(self) -> None:
        """End it as a crash would; it may have ended already."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)
        self._open.close()


class Apart:
    """A prefill and a decode node, and the proxy before them."""

    def __init__(self, prefill: Node, decode: Node) -> None:
        self.prefill, self.decode = prefill, decode
        for node in self.nodes:
            node.connect()

    @property
    def nodes(self) -> tuple[Node, Node]:
        return self.prefill, self.decode

    def restart(self, node: Node) -> None:
        """Kill one, and begin another in its place."""
        node.kill()
        if node is self.prefill:
            self.prefill = node.again()
            self.prefill.connect()
        else:
            self.decode = node.again()
            self.decode.connect()

    def ask(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        """Ask as a proxy does: one node to compute the prompt, then the other to answer."""
        first = self.prefill.ask(prompt, 1, TO_PREFILL)
        return self.decode.ask(prompt, max_tokens, first["params"] or {})
