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

from bench import engine_parts
from bench.engine_parts import PART_BYTES, ROOT, DamagedParts, asked_of, cut, join

METADATA = "vllm-0.32.0.dist-info/METADATA"
WHEEL = {
    "vllm/__init__.py": b"MADE_UP = 1\n",
    "vllm/_C_stable_libtorch.abi3.so": random.Random(0).randbytes(5000),
    "vllm/_moe_C_stable_libtorch.abi3.so": random.Random(3).randbytes(2000),
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": random.Random(1).randbytes(3000),
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": random.Random(2).randbytes(9000),
    "vllm/third_party/deep_gemm/include/some.cuh": b"__global__",
    "vllm/vllm-rs": b"\x7fELF",
    METADATA: b"Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n",
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
    assert len(parts) > 3 and PART_BYTES < 56 << 20, "the checkout goes along"
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
        "vllm/_moe_C_stable_libtorch.abi3.so",
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


REQUIRES = """\
Metadata-Version: 2.4
Name: vllm
Requires-Dist: plain
Requires-Dist: Under_Score.d>=1.31.0
Requires-Dist: has-extras[standard,other]<0.137.0,>=0.133.0
Requires-Dist: here!=6.30.*,>=5.29.6; platform_machine != "s390x"
Requires-Dist: here==7.36.1; platform_machine == "s390x"
Requires-Dist: several<1.8.0; platform_machine == "x86_64" or platform_machine == "s390x"
Requires-Dist: optional>=2; extra == "audio"
Requires-Dist: plain==9; platform_machine == "x86_64" and extra == 'audio'
Dynamic: requires-dist

Requires-Dist is told of here as well.
"""


def test_packages_come_in_the_versions_that_vllm_asks_for(tmp_path: Path) -> None:
    """Of those for this kind of machine, and without extras."""
    made = wheel(tmp_path / "some.whl", {**WHEEL, METADATA: REQUIRES.encode()})
    assert asked_of(made) == {
        "plain": "plain",
        "under-score-d": "Under_Score.d>=1.31.0",
        "has-extras": "has-extras<0.137.0,>=0.133.0",
        "here": "here!=6.30.*,>=5.29.6",
        "several": "several<1.8.0",
    }


def test_those_versions_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However either of the two writes a name."""
    asked: list[list[str]] = []

    def pip(command: list[str], check: bool) -> None:
        asked.append(command)
        folder = Path(command[command.index("-d") + 1])
        folder.mkdir(exist_ok=True)
        wheel(folder / "vllm-1.whl", {**WHEEL, METADATA: REQUIRES.encode()})

    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(engine_parts, "ALONE", ("Has_Extras",))
    monkeypatch.setattr(engine_parts, "NEEDED", ("under_score-d", "ours"))
    assert engine_parts.fetch(tmp_path / "parts", "3.12")
    engine, alone, needed = asked
    assert engine[-2:] == ["--no-deps", engine_parts.VLLM]
    assert alone[-2:] == ["--no-deps", "has-extras<0.137.0,>=0.133.0"]
    assert needed[-2:] == ["Under_Score.d>=1.31.0", "ours"] and "--no-deps" not in needed


NAMED = """
import sys
from importlib.metadata import distributions
(found,) = distributions(path=[sys.argv[1]])
tiers = {one.name for one in found.entry_points if one.group == "kvtiers.tiers"}
print(found.name, found.version, "disk" in tiers)
"""


def test_a_checkout_has_a_name_beside_it(tmp_path: Path) -> None:
    """So that its tiers are found where nothing is installed; a second time changes nothing."""
    command = [sys.executable, "-m", "bench.engine_parts", "name", str(tmp_path / "packages")]
    for _ in range(2):
        subprocess.run(command, cwd=ROOT, check=True)
    isolated = [sys.executable, "-I", "-S", "-c", NAMED, str(tmp_path / "packages")]
    ran = subprocess.run(isolated, stdout=subprocess.PIPE, text=True, check=True)
    assert ran.stdout.split() == ["kvtiers", "0.1.0", "True"]
