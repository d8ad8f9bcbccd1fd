"""A vLLM in parts that are carried one by one: cut and joined, with a wheel made up here."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bench.engine_parts import PART_BYTES, ROOT, DamagedParts, cut, join

WHEEL = {
    "vllm/__init__.py": b"MADE_UP = 1\n",
    "vllm/_C_stable_libtorch.abi3.so": random.Random(0).randbytes(5000),
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": random.Random(1).randbytes(3000),
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": random.Random(2).randbytes(9000),
    "vllm/third_party/deep_gemm/include/some.cuh": b"__global__",
    "vllm/vllm-rs": b"\x7fELF",
    "vllm-0.32.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n",
    "vllm-0.32.0.data/scripts/run": b"#!python",
}
OTHER = {"pure/__init__.py": b"", "pure/native.so": b"\x7fELF"}
PART = 3000


def wheel(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    wheels = [wheel(tmp_path / f"{n}.whl", one) for n, one in enumerate((WHEEL, OTHER))]
    return cut(wheels, tmp_path / "parts", PART)


def test_what_was_cut_is_joined_whatever_it_came_in(parts: list[Path], tmp_path: Path) -> None:
    assert len(parts) > 3 and PART_BYTES < 64 << 20
    arrived, target = tmp_path / "arrived", tmp_path / "engine"
    for part in sorted(parts, reverse=True):
        assert max(file.stat().st_size for file in part.iterdir()) <= PART
        shutil.copytree(part, arrived / part.name)
    target.mkdir()
    (target / "older").touch()
    join(arrived, target)
    found = {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()}
    assert found == {
        "vllm/__init__.py",
        "vllm/_C_stable_libtorch.abi3.so",
        "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
        "vllm-0.32.0.dist-info/METADATA",
        "pure/__init__.py",
        "pure/native.so",
        "kvtiers-0.1.0.dist-info/METADATA",
        "kvtiers-0.1.0.dist-info/entry_points.txt",
    }
    for name in found & WHEEL.keys():
        assert (target / name).read_bytes() == WHEEL[name]


LOOKS = """
from importlib.metadata import entry_points, version
import vllm
tiers = {one.name: one.load().__name__ for one in entry_points(group="kvtiers.tiers")}
plugins = [one.value for one in entry_points(group="vllm.general_plugins") if one.name == "kvtiers"]
print(vllm.MADE_UP, version("vllm"), tiers, plugins)
"""


def test_kvtiers_is_found_beside_it(parts: list[Path], tmp_path: Path) -> None:
    """Which is not installed there, and vLLM finds it by what an installed package tells of it."""
    join(parts[0].parent, tmp_path / "engine")
    path = os.pathsep.join([str(tmp_path / "engine"), str(ROOT)])
    ran = subprocess.run(
        [sys.executable, "-c", LOOKS],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert ran.stdout.startswith("1 0.32.0 {'cpu': 'CpuSpec', 'disk': 'DiskSpec', ")
    assert ran.stdout.rstrip().endswith("['tiers.engine.plugin:register']")


def test_missing_and_damaged_parts_are_named(parts: list[Path], tmp_path: Path) -> None:
    folder, target = parts[0].parent, tmp_path / "engine"
    target.mkdir()
    (target / "older").touch()
    data = (parts[2] / "part").read_bytes()
    (parts[2] / "part").write_bytes(bytes([data[0] ^ 1]) + data[1:])
    shutil.rmtree(parts[1])
    with pytest.raises(DamagedParts, match="part 01 is not here, part 02 is damaged"):
        join(folder, target)
    assert (target / "older").exists(), "what was there is still"
    with pytest.raises(DamagedParts, match="there is no part"):
        join(tmp_path / "nowhere", target)


def test_a_part_of_another_cut_is_refused(parts: list[Path], tmp_path: Path) -> None:
    changed = {**WHEEL, "vllm/__init__.py": b"MADE_UP = 2\n"}
    others = cut([wheel(tmp_path / "new.whl", changed)], tmp_path / "others", PART)
    shutil.rmtree(parts[0])
    shutil.copytree(others[0], parts[0])
    with pytest.raises(DamagedParts, match="of another cut"):
        join(parts[0].parent, tmp_path / "engine")
