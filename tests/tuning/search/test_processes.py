"""Simulations in several processes are those of one, and end with the process that asks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tuning.known_traffic import BLOCK, BLOCK_TOKENS, KV_BYTES, loop, requests
from tiers.errors import KVTiersError
from tiers.tuning.machine import Machine, TierProfile
from tiers.tuning.search import processes
from tiers.tuning.search.processes import Simulations
from tiers.tuning.simulation.sim_chain import SimChain, SimTier
from tiers.tuning.simulation.workload import Workload

MACHINE = Machine(
    kv_bytes_per_token=KV_BYTES,
    engine_cache=0,
    prefill_rate=1e4,
    tiers={"cpu": TierProfile(load_bandwidth=1e9, store_bandwidth=1e9)},
)
WORKLOAD = Workload.of(requests(loop(5, 4, 40)), BLOCK_TOKENS)
CHAINS = [SimChain((SimTier("cpu", "cpu", True, blocks * BLOCK),)) for blocks in (4, 20, 40, 20)]


def test_two_processes_tell_what_one_tells() -> None:
    jobs = [(chain, 1.0, 0.5) for chain in CHAINS]
    with Simulations(WORKLOAD, MACHINE) as alone:
        expected = list(alone.run(jobs))
    assert [job for job, _ in expected] == jobs[:3], "one chain is there twice"
    with Simulations(WORKLOAD, MACHINE, 2) as several:
        for _ in range(2):
            told = list(several.run(jobs))
            assert len(told) == 3 and dict(told) == dict(expected)


def test_an_error_of_the_simulation_reaches_who_asked() -> None:
    unknown = SimChain((SimTier("disk", "disk", False, BLOCK),))
    with Simulations(WORKLOAD, MACHINE, 1) as one, pytest.raises(KVTiersError, match="disk"):
        list(one.run([(unknown, 1.0, 0.5)]))


def test_a_process_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "simulate", lambda *args, **kw: os.kill(os.getpid(), 9))
    with Simulations(WORKLOAD, MACHINE, 2) as two, pytest.raises(KVTiersError, match="status -9"):
        list(two.run([(CHAINS[0], 1.0, 0.5)]))


def test_processes_end_when_their_parent_is_killed() -> None:
    code = """
import os, signal
from tests.tuning.search.test_processes import MACHINE, WORKLOAD
from tiers.tuning.search.processes import Simulations
several = Simulations(WORKLOAD, MACHINE, 2)
print(*(worker._process.pid for worker in several._workers), flush=True)
signal.pause()
"""
    root = Path(__file__).parents[3]
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    children = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(children) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    for pid in children:
        while _runs(pid):
            time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Whether a process is there that is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
