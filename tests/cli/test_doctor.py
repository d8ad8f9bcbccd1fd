"""`kvtiers doctor`: one command line for a person, a script and an init container."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spec.findings import GRAVITIES
from tests.support.plugin_packages import Install

Run = Callable[..., tuple[int, str, str]]

EXAMINED = """
import os, time
from collections.abc import Iterator
from typing import Literal
from spec.findings import DoctorFinding
from spec.offloading import StoreContext, StoreSpec

class Plain(StoreSpec):
    type: Literal["plain"] = "plain"
    def open(self, site: StoreContext):
        raise NotImplementedError

class Asked(Plain):
    type: Literal["asked"] = "asked"
    def examine(self) -> Iterator[DoctorFinding]:
        yield DoctorFinding("note", "its bucket is far away", "name a nearer one", "a euro a day")
        raise ZeroDivisionError("of a plugin")

class Deadly(Plain):
    type: Literal["deadly"] = "deadly"
    def examine(self) -> Iterator[DoctorFinding]:
        os.abort()
        yield
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def chain(*tiers: dict[str, object], **settings: object) -> Path:
        path = tmp_path / "chain.yaml"
        path.write_text(json.dumps({"version": 1, "tiers": tiers, **settings}))
        return path

    return chain


def test_a_place_without_a_chain(kvtiers: Run) -> None:
    status, out, err = kvtiers("doctor")
    assert err == "" and "machine: " in out and "plugins: tier types: cpu, disk" in out
    assert status == int("error  " in out)


def test_what_would_keep_a_tier_from_serving(kvtiers: Run, write: Any, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    disk = {"type": "disk", "capacity": "1MiB", "path": str(folder)}
    assert kvtiers("doctor", write(disk))[0] == 0
    folder.chmod(0o777)
    status, out, err = kvtiers("doctor", write({"type": "cpu", "capacity": "1GiB"}, disk))
    assert (status, err) == (1, "")
    first, change, *rest = out.splitlines()
    assert first.startswith(f"error       disk: {folder} has mode 0777")
    assert change.split()[:4] == ["change:", "chmod", "it", "to"]
    assert rest[-1].startswith("1 error, ")
    shown = [line[:10].strip() for line in [first, *rest[:-1]] if line[0] != " "]
    assert shown == sorted(shown, key=GRAVITIES.index)


def test_json(kvtiers: Run, write: Any, tmp_path: Path) -> None:
    disk = {"type": "disk", "capacity": "1MiB", "path": str(tmp_path / "kv")}
    path = write({"type": "cpu", "capacity": "1MiB"}, disk)
    status, out, err = kvtiers("doctor", path, "--json")
    found = json.loads(out)["findings"]
    assert (status, err) == (0, "")
    assert {"machine", "engine", "control", "plugins", "disk"} == {each["about"] for each in found}
    assert all(set(each) == {"about", "gravity", "found", "change", "cost"} for each in found)


def test_a_bad_chain(kvtiers: Run, write: Any) -> None:
    path = write({"type": "disk", "capacity": "1XB", "path": "/kv"})
    status, out, err = kvtiers("doctor", path)
    assert (status, out) == (2, "") and "tiers[0].capacity" in err
    status, out, err = kvtiers("doctor", path, "--json")
    assert (status, err) == (2, "") and "tiers[0].capacity" in json.loads(out)["problems"][0]


def test_a_chain_that_is_never_read(
    kvtiers: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "chain.yaml")
    monkeypatch.setattr("tiers.cli.doctor.LOAD_SECONDS", 0.2)
    status, out, err = kvtiers("doctor", tmp_path / "chain.yaml")
    assert (status, out) == (2, "") and "was not read in 0.2 s" in err
    with (tmp_path / "chain.yaml").open("w"):  # lets the thread go
        pass


def test_standard_input(write: Any) -> None:
    with write({"type": "cpu", "capacity": "1MiB"}).open() as file:
        command = [str(Path(sys.executable).parent / "kvtiers"), "doctor", "-"]
        done = subprocess.run(command, stdin=file, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "machine: " in done.stdout


def test_nothing_heavy_is_loaded_before_the_forks(write: Any) -> None:
    """It would take seconds, and start threads."""
    path = write({"type": "cpu", "capacity": "1MiB"})
    code = (
        f"import sys; sys.argv[1:] = ['doctor', {str(path)!r}]\n"
        "from tiers.cli.main import main\n"
        "try: main()\n"
        "finally: print(*{'torch', 'vllm', 'lmdb', 'redis', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, ""), done.stderr


def test_tiers_of_plugins(kvtiers: Run, plugin: Install, write: Any) -> None:
    plugin("examined", EXAMINED, plain="Plain", asked="Asked", deadly="Deadly")
    plugin("broken", "import nothing_of_that_name", broken="Broken")
    status, out, err = kvtiers("doctor", write({"type": "plain"}, {"type": "asked"}), "--json")
    found = json.loads(out)["findings"]
    assert (status, err) == (0, "")
    status, out, _ = kvtiers("doctor", write({"type": "deadly"}))
    assert status == 1 and out.startswith("error       deadly: its place did not answer within 20")
    note, failed = sorted(
        (each for each in found if each["about"] == "asked"), key=lambda each: each["gravity"]
    )[::-1]
    assert note["found"] == "its bucket is far away" and note["cost"] == "a euro a day"
    assert "ZeroDivisionError: of a plugin" in failed["found"]
    (plain,) = [each for each in found if each["about"] == "plain"]
    assert plain["gravity"] == "can't tell" and "no checks of its own" in plain["found"]
    (broken,) = [each for each in found if "broken" in each["found"]]
    assert broken["gravity"] == "warning" and "its package broken 1.0 is broken" in broken["found"]


def test_keys_to_encrypt_with(kvtiers: Run, write: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ab" * 32)
    keys.chmod(0o644)
    tier = {"type": "disk", "capacity": "1MiB", "path": str(tmp_path / "kv")}
    _, out, _ = kvtiers("doctor", write({**tier, "encryption": {"key_file": str(keys)}}))
    assert f"warning     disk: every user can read the keys in {keys}" in out
    assert "disk: blocks are encrypted, with 1 key(s)" in out


def test_the_engines_own_environment(
    kvtiers: Run, write: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = write({"type": "disk", "capacity": "1MiB", "path": str(tmp_path / "kv")})
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    _, out, _ = kvtiers("doctor", path)
    assert "can't tell  engine: whether other processes find these blocks" in out
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setenv("VLLM_PLUGINS", "others,more")
    status, out, _ = kvtiers("doctor", path)
    assert status == 1 and "error       engine: VLLM_PLUGINS=others,more keeps vLLM from" in out
    assert "PYTHONHASHSEED is set" in out


USES = {
    "control": "engines listen to commands in",
    "record": "requests are recorded in",
    "events": "what was announced is kept in",
}
MISSING = {**dict.fromkeys(USES, "a/b: No such file"), "record": "requests are recorded in"}
"""Where what the folder is in is missing, too."""


def test_the_folders_of_commands_and_others(kvtiers: Run, write: Any, tmp_path: Path) -> None:
    """An engine would serve without them."""
    (tmp_path / "file").touch()
    (tmp_path / "there").mkdir(mode=0o700)
    for name, says in (
        ("new", USES),
        ("there", USES),
        ("a/b", MISSING),
        ("file", dict.fromkeys(USES, "is no folder")),
        ("x" * 300, dict.fromkeys(USES, "x: File name too long")),
    ):
        place = str(tmp_path / name)
        folders = {one: {"path" if one == "record" else "folder": place} for one in USES}
        status, out, _ = kvtiers("doctor", write({"type": "cpu", "capacity": "1MiB"}, **folders))
        assert status == 0
        for about, said in says.items():
            (line,) = (line for line in out.splitlines() if f" {about}: " in line)
            gravity = "fine" if said == USES[about] else "warning"
            assert line.startswith(gravity) and said in line
        assert ("name another" in out or "name one" in out) == (says is not USES)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "there", "chain.yaml"}


def test_options_that_can_not_be_used(kvtiers: Run, tmp_path: Path) -> None:
    assert kvtiers("doctor", "--engine-args", "--x")[0] == 2
    status, _, err = kvtiers("doctor", "--model", tmp_path)
    assert status == 2 and "found no config.json in it" in err
    (tmp_path / "config.json").write_text("{}")
    status, out, err = kvtiers("doctor", "--model", tmp_path, "--engine-args", "--x 'y")
    assert (status, out) == (2, "") and err.startswith("--engine-args --x 'y: No closing quotation")
