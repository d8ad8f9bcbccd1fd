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
from tests.engine.vllm.tiny_vllm import BLOCK_BYTES, documents, hosted
from tests.engine.vllm.vllm_chains import cpu, disk, tiers
from tests.support.clock import wait_for
from tiers.disk.disk_store import DiskStore
from tiers.disk.folder.owner import scan_owners

pytestmark = [pytest.mark.vllm, pytest.mark.faults]

KILLS = int(os.environ.get("KVTIERS_KILLS", "3"))
"""As many of each kind; more by hand."""


@pytest.mark.fault
@pytest.mark.timeout(600 * KILLS)
@pytest.mark.parametrize("kind", ["own", "hosted"])
def test_killed_engines_leave_no_memory_and_no_lock(
    vllm_jobs: subprocess.Popen[str], tiny_llama: Path, tmp_path: Path, kind: str
) -> None:
    """In the midst of stores and loads; and the next engine serves what the folder has."""
    room = (KILLS + 2) * 64 << 20  # a fast engine stores all that it is asked, and evicts nothing
    chain = (cpu("2MiB"), disk(tmp_path / "disk") | {"capacity": f"{room}B"})
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
    # A process that is killed has its locks, and the room it had reserved, until it has ended.
    wait_for(lambda: not scan_owners(tmp_path / "disk" / "owners", one_host=True).alive)
    store = DiskStore(tmp_path / "disk", room, StoreContext(BLOCK_BYTES))
    audit(store)
    with folder_of(store).index.edit(b"auditor of slots") as edit:
        assert not list(edit.reservations()), "room that nobody will fill"
    store.close()


def named_memory() -> set[str]:
    """Files of hosted engines' memory, and the locks beside them."""
    return {path.name for path in Path("/dev/shm").glob("vllm_offload_kvtiers_*")}


@pytest.mark.fault
@pytest.mark.timeout(300 * KILLS)
def test_what_an_engine_killed_while_it_opens_leaves_goes_with_the_next(
    vllm_jobs: subprocess.Popen[str], tiny_llama: Path, tmp_path: Path
) -> None:
    """Its host memory has a name then, for its other processes to map it."""
    config = hosted(cpu("2MiB"), disk(tmp_path / "disk"))
    others, left = named_memory(), set[str]()
    for number in range(KILLS):
        node = Node(vllm_jobs, tiny_llama, tmp_path / f"{number}", config, 40, 1024)
        try:
            wait_for(lambda: any(n.endswith(".mmap") for n in named_memory() - others), 240)
        finally:
            node.kill()
        left |= named_memory() - others
    assert len(left & named_memory()) == 2, "the last one's, and the lock that says so"
    node = Node(vllm_jobs, tiny_llama, tmp_path / "next", config, 40, 1024)
    try:
        node.connect()
        assert node.ask(documents(1, 600)[0], 8, {})["tokens"]
    finally:
        node.kill()
    assert not left & named_memory()
