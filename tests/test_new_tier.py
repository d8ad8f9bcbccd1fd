"""What `kvtiers new-tier` writes installs, passes the kit and serves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner

from spec.load import load_chain
from spec.registry import tier_class
from tests.support.plugin_packages import write_package
from tests.support.process_worker import fresh
from tests.test_readme import blocks
from tiers.cli.main import app
from tiers.cli.new_tier import write_tier
from tiers.lab.try_chain import Seen, try_chain

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent
LIMIT = 240.0


def test_it_is_a_package_whose_type_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = write_tier("my-box", tmp_path / "new")
    for path in made:
        text = path.read_text()
        assert not re.search(r"NAME|PACKAGE|CLASS|VERSION|PAGE|[Tt]emplate", text), path
        if path.suffix == ".py":
            compile(text, str(path), "exec")
    project = tomllib.loads((tmp_path / "new" / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["kvtiers.tiers"]
    assert points == {"my-box": "my_box_tier.spec:MyBoxSpec"}
    place = write_package(tmp_path, "stands_for_it", "")
    info = place / "stands_for_it-1.0.dist-info"
    (info / "entry_points.txt").write_text(f"[kvtiers.tiers]\nmy-box = {points['my-box']}\n")
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.syspath_prepend(str(tmp_path / "new"))
    assert tier_class("my-box").__name__ == "MyBoxSpec"
    load_chain(tmp_path / "new" / "chain.yaml")


@pytest.mark.parametrize("name", ["My", "a b", "", "a_b", "-a", "../a", "class"])
def test_a_name_that_fits_no_package_is_refused(tmp_path: Path, name: str) -> None:
    said = CliRunner().invoke(app, ["new-tier", "--folder", str(tmp_path / "new"), "--", name])
    assert said.exit_code == 2 and "write small letters" in said.output
    assert not (tmp_path / "new").exists()


def test_nothing_is_written_over(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["new-tier", "my-box", "--folder", str(tmp_path)])
    assert said.exit_code == 2 and list(tmp_path.iterdir()) == []
    said = CliRunner().invoke(app, ["new-tier", "disk", "--folder", str(tmp_path / "new")])
    assert said.exit_code == 2 and not (tmp_path / "new").exists()


def test_a_chain_is_tried_in_places_of_its_own(tmp_path: Path) -> None:
    """The second process finds in the disk what the first has stored."""
    tiers = [
        {"type": "cpu", "capacity": "8GiB"},
        {"type": "disk", "capacity": "1GiB", "path": str(tmp_path / "nowhere")},
    ]
    (tmp_path / "tried").mkdir()
    first, second = try_chain(load_chain({"version": 1, "tiers": tiers}), tmp_path / "tried")
    assert (first.wrong, second.wrong) == (0, 0)
    assert first.stored["disk"] > 100 and first.loaded["cpu"] > 0
    assert second.loaded["disk"] == second.prompts * 120 and second.loaded["cpu"] == 0
    assert not (tmp_path / "nowhere").exists()


def test_a_tier_that_stored_nothing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked = SimpleNamespace(get_context=lambda _: fresh())
    monkeypatch.setattr("tiers.lab.try_chain.multiprocessing", forked)
    disk = {"type": "disk", "capacity": "1GiB", "path": str(tmp_path), "store_threshold": 1000}
    chain = {"version": 1, "tiers": [{"type": "cpu", "capacity": "8GiB"}, disk]}
    (tmp_path / "chain.yaml").write_text(yaml.safe_dump(chain))
    said = CliRunner().invoke(app, ["try", str(tmp_path / "chain.yaml")])
    assert "disk stored nothing" in said.output and "cpu stored nothing" not in said.output
    asks = f"each tier was tried in an empty place: kvtiers doctor {tmp_path}/chain.yaml asks yours"
    assert said.output.splitlines()[-2] == asks, "a Redis that nobody reaches passed"
    assert said.exit_code == 0


@pytest.mark.parametrize("wrong", [(1, 0), (0, 1)])
def test_a_wrong_answer_of_either_process_is_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: tuple[int, int]
) -> None:
    found = [Seen(2, wrong[n], {"cpu": 7}, {"cpu": loaded}) for n, loaded in enumerate((5, 9))]
    monkeypatch.setattr("tiers.lab.try_chain.try_chain", lambda chain, folder: found)
    (tmp_path / "chain.yaml").write_text("version: 1\ntiers: [{type: cpu, capacity: 1GiB}]\n")
    said = CliRunner().invoke(app, ["try", str(tmp_path / "chain.yaml")])
    assert said.exit_code == 1 and "1 of 4 answers were wrong" in said.output
    assert said.output.splitlines()[1].split() == ["cpu", "7", "5", "9"]


@pytest.mark.parametrize(
    ("stored", "loaded", "more", "status"),
    [
        ((7, 7, 7), (0, 0, 0), "", 1),
        ((7, 7, 7), (9, 0, 0), "", 1),
        ((7, 7, 7), (0, 9, 0), "", 0),
        ((7, 7, 7), (0, 0, 9), "", 0),
        ((7, 0, 0), (0, 0, 0), "", 0),
        ((7, 0, 7), (0, 0, 0), ", paused: reads", 1),
        ((7, 7, 0), (0, 0, 0), ", paused: reads", 0),
    ],
)
def test_stores_of_which_another_process_loads_nothing_are_status_1(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stored: tuple[int, ...],
    loaded: tuple[int, ...],
    more: str,
    status: int,
) -> None:
    """Of stores that have the same blocks one may serve them all; `loaded` is the other's."""
    names = ("cpu", "a", "b")
    first, second = (dict(zip(names, of, strict=True)) for of in (stored, loaded))
    found = [Seen(2, 0, first, dict.fromkeys(names, 5)), Seen(2, 0, {}, second)]
    monkeypatch.setattr("tiers.lab.try_chain.try_chain", lambda chain, folder: found)
    disk = f"type: disk, path: {tmp_path}/"
    (tmp_path / "chain.yaml").write_text(
        "version: 1\ntiers:\n- {type: cpu, capacity: 1GiB}\n"
        f"- {{{disk}a, name: a, capacity: 1GiB{more}}}\n- {{{disk}b, name: b, capacity: 1GiB}}\n"
    )
    said = CliRunner().invoke(app, ["try", str(tmp_path / "chain.yaml")])
    assert said.exit_code == status, said.output
    assert ("another process loaded nothing" in said.output) == status


class Environment:
    """An environment that sees our dependencies and the checkout, and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        home = folder / "venv"
        venv.create(home, symlinks=True)
        (site,) = home.glob("lib/python*/site-packages")
        ours = [path for path in sys.path if path.endswith("site-packages")]
        (site / "dependencies.pth").write_text("\n".join([*ours, str(ROOT)]))
        programs = {
            "kvtiers": "from tiers.cli.main import main\nif __name__ == '__main__':\n    main()\n",
            "pip": "from pip._internal.cli.main import main\nraise SystemExit(main())\n",
        }
        for name, code in programs.items():
            (home / "bin" / name).write_text(f"#!{home}/bin/python\n{code}")
            (home / "bin" / name).chmod(0o755)
        gone = {"PYTHONPATH", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST"}
        self._variables = {key: value for key, value in os.environ.items() if key not in gone}
        self._variables |= {
            "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PIP_NO_INDEX": "1",
            "PIP_NO_DEPS": "1",
            "PIP_NO_BUILD_ISOLATION": "0",
        }

    def run(self, command: str) -> str:
        done = subprocess.run(
            ["sh", "-ec", command.replace("pytest", "python -m pytest -q -p no:cacheprovider")],
            cwd=self.folder,
            env=self._variables,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.mark.faults
def test_from_the_name_to_a_chain_that_serves(tmp_path: Path) -> None:
    """Each command of what is written, as it is written, but without an index."""
    made = Environment(tmp_path)
    said = made.run("kvtiers new-tier my-box")
    made.folder = made.folder / "kvtiers-my-box"
    assert said.splitlines()[-1].startswith("next: cd kvtiers-my-box && pip install")
    readme = (made.folder / "README.md").read_text()
    (commands,) = (block.text for block in blocks(readme) if block.language == "sh")
    printed = [made.run(line.partition("#")[0]) for line in commands.splitlines()]
    _, kit, checked, tried = printed
    assert " passed" in kit and "failed" not in kit
    assert " passed" in checked and "failed" not in checked
    assert "0 of 18 answers were wrong" in tried
    (row,) = [line.split() for line in tried.splitlines() if line.startswith("my-box")]
    assert int(row[3]) > 0, "the second process loaded nothing from it"


@pytest.mark.faults
def test_the_page_of_plugins_from_an_empty_environment(tmp_path: Path) -> None:
    """docs/plugins.md, as a stranger follows it."""
    shown = blocks((ROOT / "docs" / "plugins.md").read_text())
    made = Environment(tmp_path)
    store, kit, *_ = (block.text for block in shown if block.language == "python")
    (project,) = (block.text for block in shown if block.language == "toml")
    (chain,) = (block.text for block in shown if block.language == "yaml")
    (made.folder / "folder_tier.py").write_text(store)
    (made.folder / "test_folder_tier.py").write_text(kit)
    (made.folder / "pyproject.toml").write_text(project)
    (made.folder / "chain.yaml").write_text(chain)
    made.run("pip install -e .")
    assert "failed" not in made.run("pytest")
    assert "folder" in made.run("kvtiers validate chain.yaml")
    assert "failed" not in made.run("kvtiers check folder")
    assert "0 of 18 answers were wrong" in made.run("kvtiers try chain.yaml")
