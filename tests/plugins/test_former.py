"""The example of a plugin of each version of the API that is read works as it was written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest

from spec import plugins
from spec.load import load_chain
from tests.support.plugin_packages import Install
from tests.support.replay_chains import SLOT, asked_twice

HERE = Path(__file__).parent
READ = [plugins.PLUGIN_API]


@pytest.mark.parametrize("api", READ)
def test_it_serves(api: int, tmp_path: Path, plugin: Install) -> None:
    plugin("folder_tier", _source(api, "folder_tier"), folder="FolderSpec")
    place = tmp_path / "blocks"
    place.mkdir()
    tiers = [{"type": "cpu", "capacity": 4 * SLOT}, {"type": "folder", "path": str(place)}]
    chain = load_chain({"version": 1, "tiers": tiers, "staging": 64 * SLOT, "load_when": "always"})
    assert asked_twice(chain, "folder") > 0


@pytest.mark.parametrize("api", READ)
def test_its_kit_passes(api: int, tmp_path: Path, plugin: Install) -> None:
    plugin("folder_tier", _source(api, "folder_tier"), folder="FolderSpec")
    sys.modules.pop("folder_tier", None)
    made: dict[str, Any] = {"__name__": "test_folder_tier"}
    exec(_source(api, "test_folder_tier"), made)
    passed = 0
    for name in (name for name in dir(made["TestFolder"]) if name.startswith("test_")):
        if "are_not_kept" in name and sys.version_info[:2] == (3, 12):
            continue  # they are: pathlib, by which it names its files, keeps all names there
        if "errors_are_raised" in name and sys.version_info >= (3, 14):
            continue  # pathlib's `exists`, by which it looks, hides them there
        kit = made["TestFolder"]()
        kit.path = tmp_path / name
        kit.path.mkdir()
        try:
            getattr(kit, name)()
            passed += 1
        except SkipTest:
            pass
    assert passed > 20
    sys.modules.pop("folder_tier", None)


def _source(api: int, module: str) -> str:
    return (HERE / f"api_{api}" / f"{module}.py.txt").read_text()
