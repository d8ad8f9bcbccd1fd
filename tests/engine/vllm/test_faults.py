"""A real vLLM engine while Redis hangs and dies and its disk is damaged and full."""

from __future__ import annotations

import os
import random
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.vllm.tiny_vllm import Run, documents
from tests.support.servers import RedisServer, binaries

pytestmark = [pytest.mark.vllm, pytest.mark.faults]

MAX_WAIT = 1.0
PROMPTS = documents(25, 600)
REQUESTS = [(PROMPTS[n], 4) for n in random.Random(3).choices(range(25), k=200)]
"""Two hundred requests on twenty-five prompts, of which the engine itself keeps two."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB, to be filled."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m,mode=700", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system can be mounted by root only")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


class Vandal(threading.Thread):
    """Breaks one thing after the other, from the first stored block on."""

    def __init__(self, folder: Path, server: RedisServer) -> None:
        super().__init__(daemon=True)
        self.rounds = 0
        self.done = threading.Event()
        self._folder = folder
        self._server = server
        self._random = random.Random(5)

    def run(self) -> None:
        while not any(self._folder.glob("tier/slab-*")):
            if self.done.wait(0.05):
                return
        while not self.done.wait(1.0):
            self._server.hang()
            self._damage()
            self.done.wait(1.0)
            self._server.resume()
            ballast = self._fill()
            self._server.kill()
            self.done.wait(1.0)
            self._server.start()
            ballast.unlink()
            self._damage()
            self.rounds += 1

    def _damage(self) -> None:
        """Change the slabs in a hundred places."""
        for slab in self._folder.glob("tier/slab-*"):
            with slab.open("r+b") as file:
                size = os.fstat(file.fileno()).st_size
                for _ in range(100):
                    file.seek(self._random.randrange(size))
                    file.write(self._random.randbytes(2))

    def _fill(self) -> Path:
        path = self._folder / "ballast"
        with path.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                return path
        return path


@pytest.mark.fault
@pytest.mark.timeout(900)
def test_two_hundred_requests(run_vllm: Callable[..., Run], small_disk: Path) -> None:
    batches = [[request] for request in REQUESTS]
    cold = run_vllm(batches, enable_prefix_caching=False)
    with RedisServer(next(iter(binaries().values()))) as server:
        tiers = [
            {"type": "cpu", "capacity": "5MiB", "verify": "always"},
            {"type": "disk", "capacity": "1GiB", "path": str(small_disk / "tier")},
            {"type": "redis", "url": server.url, "timeout": "500ms"},
        ]
        vandal = Vandal(small_disk, server)
        vandal.start()
        run = run_vllm(batches, tiers, load_policy="stitched", max_wait=f"{MAX_WAIT}s")
        vandal.done.set()
        vandal.join()
        server.resume()
    assert vandal.rounds >= 2
    assert run.tokens == cold.tokens
    served = run.loaded()
    assert served.get("disk", 0) > 0, served
    late = sorted(ttft for (ttft,) in run.ttft)
    usual = sorted(ttft for (ttft,) in cold.ttft)
    print(f"p99 TTFT {late[198]:.3f} s, cold {usual[198]:.3f} s; from tiers: {served}")
    assert late[198] <= usual[198] + MAX_WAIT
