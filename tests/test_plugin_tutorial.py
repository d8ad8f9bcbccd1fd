"""What docs/plugins.md shows is a tier: it keeps the contract, and serves in a chain."""

from __future__ import annotations

import errno
import importlib
import io
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from spec import plugins
from spec.load import load_chain
from tests.support.plugin_packages import Install, write_package
from tests.support.replay_chains import SLOT, asked_twice
from tests.test_readme import blocks
from tiers.lab.replay.replay_trace import replay
from tiers.testing import Memory, make_key
from tiers.traces.trace import TraceRequest
from tiers.tuning.machine import Machine, TierProfile

ROOT = Path(__file__).parent.parent
SHOWN = blocks((ROOT / "docs" / "plugins.md").read_text())
MODULE, KIT, LOOP = (block.text for block in SHOWN if block.language == "python")
(PROJECT,) = (tomllib.loads(block.text) for block in SHOWN if block.language == "toml")
(CHAIN,) = (block.text for block in SHOWN if block.language == "yaml")
TYPES = {
    name: value.removeprefix("folder_tier:")
    for name, value in PROJECT["project"]["entry-points"]["kvtiers.tiers"].items()
}


def test_the_store_keeps_the_contract(tmp_path: Path) -> None:
    place = write_package(tmp_path, "folder_tier", MODULE, **TYPES)
    (place / "test_folder_tier.py").write_text(KIT)
    run_kit(place)


def run_kit(place: Path) -> str:
    """Run the kit in a package's folder, which must pass; what it says."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "."]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), str(ROOT)])}
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    return done.stdout


def test_a_store_over_asyncio_keeps_the_contract_and_is_seen_to_end_in_time(tmp_path: Path) -> None:
    place = write_package(tmp_path, "folder_tier", MODULE, **TYPES)
    (place / "loop_tier.py").write_text(LOOP)
    kit = KIT.replace("folder_tier", "loop_tier").replace("Folder", "Loop")
    (place / "test_loop_tier.py").write_text(kit)
    assert "test_a_get_that_is_given_up_ends_and_does_no_harm PASSED" in run_kit(place)


def test_the_package_installs_beside_its_tests(tmp_path: Path) -> None:
    """By what `pip install -e .` calls."""
    (source,) = (block.text for block in SHOWN if block.language == "toml")
    (tmp_path / "pyproject.toml").write_text(source)
    (tmp_path / "folder_tier.py").write_text(MODULE)
    (tmp_path / "test_folder_tier.py").write_text(KIT)
    build = "from setuptools import build_meta; print(build_meta.build_editable('.'))"
    command = [sys.executable, "-c", build]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as made:
        points = made.read("folder_tier-1.0.dist-info/entry_points.txt").decode()
    assert "folder = folder_tier:FolderSpec" in points


def test_it_is_replayed_apart_from_its_place(tmp_path: Path, plugin: Install) -> None:
    plugin("folder_tier", MODULE, **TYPES)
    turns = [range(25), range(100, 125), range(25)]
    prompts = [TraceRequest(9000.0 * n, 400, 1, list(turn)) for n, turn in enumerate(turns)]
    link = {"folder": TierProfile(load_bandwidth=1e9, store_bandwidth=1e9)}
    on = Machine(kv_bytes_per_token=1000, engine_cache=30 * 16000, prefill_rate=1000, tiers=link)
    tier = {"type": "folder", "path": str(tmp_path / "nowhere")}
    chain = load_chain({"version": 1, "staging": "1MiB", "tiers": [tier]})
    assert replay(prompts, 16, chain, on).hit_tokens["folder"] > 0
    assert not (tmp_path / "nowhere").exists()


def test_a_write_that_fails_leaves_no_file(tmp_path: Path) -> None:
    """A full disk would fill further, with files that nobody finds or evicts."""
    made: dict[str, Any] = {}
    exec(MODULE, made)
    store = made["FolderStore"](tmp_path, 4096)

    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            super().write(data[:100])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    made["open"] = Full
    with pytest.raises(OSError, match="space"):
        store.put(Memory([make_key()], 4096).fill().blocks)
    assert list(tmp_path.iterdir()) == []


def test_the_chain_serves(tmp_path: Path, plugin: Install) -> None:
    plugin("folder_tier", MODULE, **TYPES)
    written = yaml.safe_load(CHAIN)
    (tmp_path / "folder").mkdir()
    written["tiers"][0]["capacity"] = 4 * SLOT
    written["tiers"][1]["path"] = str(tmp_path / "folder")
    assert asked_twice(load_chain({**written, "staging": 64 * SLOT}), "folder") > 0


def test_what_the_page_calls_public_is_there() -> None:
    page = (ROOT / "docs" / "plugins.md").read_text()
    rows = re.findall(r"^\| `((?:spec|tiers)\.[\w.]+)` \| (.*) \|$", page, re.M)
    assert len(rows) == 8
    for module, names in rows:
        there = vars(importlib.import_module(module))
        assert [name for name in re.findall(r"`(\w+)`", names) if name not in there] == []


def test_the_page_names_the_api_that_is_read() -> None:
    page = (ROOT / "docs" / "plugins.md").read_text()
    assert f"The version of the plugin API is **{plugins.PLUGIN_API}**" in page
    anchor = plugins.PAGE.partition("#")[2].replace("-", " ")
    assert anchor in page.lower().replace(",", "")
