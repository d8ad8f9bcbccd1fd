"""Engines that are killed at any moment while they serve leave nothing behind."""

from __future__ import annotations

import os
import random
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from spec.offloading import StoreContext
from tests.disk.audit import audit, folder_of
from tests.engine.vllm.apart import Node
from tests.engine.vllm.tiny_vllm import documents, hosted
from tests.engine.vllm.vllm_chains import cpu, disk, tiers
from tiers.disk.disk_store import DiskStore

pytestmark = [pytest.mark.vllm, pytest.mark.faults]

BLOCK_BYTES = 4 * 2 * 2 * 32 * 32 * 4
"""Layers, K and V, heads, their size, tokens per block, float32."""
KILLS = int(os.environ.get("KVTIERS_KILLS", "3"))
"""As many of each kind; more by hand."""


@pytest.mark.fault
@pytest.mark.timeout(600 * KILLS)
@pytest.mark.parametrize("kind", ["own", "hosted"])
def test_killed_engines_leave_no_memory_and_no_lock(
    vllm_jobs: subprocess.Popen[str], tiny_llama: Path, tmp_path: Path, kind: str
) -> None:
    """In the midst of stores and loads; and the next engine serves what the folder has."""
    chain = (cpu("2MiB"), disk(tmp_path / "disk"))
    config = tiers(*chain) if kind == "own" else hosted(*chain)
    prompts, chance = documents(4, 600), random.Random(KILLS)
    said: dict[int, Any] = {}
    maps: set[str] = set()
    served = 0.0
    for number in range(KILLS + 1):
        node = Node(vllm_jobs, tiny_llama, tmp_path / f"{number}", config, 40, 1024)
        try:
            node.connect()
            maps |= node.shared_memory()
            for at, prompt in enumerate(prompts if number in (0, KILLS) else ()):
                answer = node.ask(prompt, 8, {})
                assert answer["tokens"] == said.setdefault(at, answer["tokens"])
                served += answer["cached"]
            node.measured()
            killing = threading.Timer(chance.uniform(0.0, 0.5), node.kill)
            killing.start()
            with suppress(AssertionError, OSError, ValueError):  # it ends in the midst of them
                for prompt in documents(50, 600, seed=number) + prompts:
                    node.ask(prompt, 1, {})
            killing.join()
        finally:
            node.kill()
    assert served >= 2 * 18 * 32, "what was stored before all kills"
    assert not [path for path in maps if Path(path).exists()]
    store = DiskStore(tmp_path / "disk", 64 << 20, StoreContext(BLOCK_BYTES))
    audit(store)
    with folder_of(store).index.edit(b"auditor of slots") as edit:
        assert not list(edit.reservations()), "room that nobody will fill"
    store.close()
