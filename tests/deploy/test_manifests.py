"""What starts an engine elsewhere: each file by the checker of its kind, its chain by ours, and its
commands run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from spec.load import load_chain
from tests.deploy.prometheus_server import DEPLOY

KUBERNETES = DEPLOY / "kubernetes" / "engine.yaml"
COMPOSE = DEPLOY / "container" / "compose.yaml"
UNIT = DEPLOY / "systemd" / "kvtiers@.service"
CONTAINERFILE = DEPLOY / "container" / "Containerfile"
REQUESTS, DRAIN = 60, 10
"""Seconds that answers may take until an engine ends, and that it then waits for each tier."""


def _objects() -> dict[str, dict[str, Any]]:
    """Kubernetes' objects by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all(KUBERNETES.read_text())}


def _pod() -> dict[str, Any]:
    found = _objects()["StatefulSet"]["spec"]["template"]["spec"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("version", ["1.29", "1.34"])
def test_kubernetes_takes_each_object(version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for made in _objects().values():
        validate.validate(made, version, strict=True)
    wrong = _objects()["StatefulSet"]
    wrong["spec"]["template"]["spec"]["terminationGracePeriod"] = 5
    with pytest.raises(validate.ValidationError, match="terminationGracePeriod"):
        validate.validate(wrong, version, strict=True)


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    text = UNIT.read_text().replace("/opt/kvtiers/bin/serve", str(DEPLOY / "serve"))

    def verify(text: str) -> str:
        unit = tmp_path / UNIT.name
        unit.write_text(text)
        command = ["systemd-analyze", "verify", str(unit)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr

    assert verify(text) == ""
    assert "KilMode" in verify(text.replace("KillMode", "KilMode"))


def _chains() -> Iterator[dict[str, Any]]:
    yield yaml.safe_load(_objects()["ConfigMap"]["data"]["chain.yaml"])
    yield yaml.safe_load((DEPLOY / "container" / "chain.yaml").read_text())


@pytest.mark.parametrize("chain", list(_chains()), ids=["kubernetes", "compose"])
def test_chains_load_and_fit_what_is_asked_for(chain: dict[str, Any]) -> None:
    tiers = load_chain(chain).tiers
    places = [str(getattr(tier, "path", "")) for tier in tiers]
    assert [path for path in places if path] == ["/var/lib/kvtiers/disk"], "below the volume"


def test_who_stops_an_engine_waits_for_requests_and_tiers() -> None:
    """vLLM kills its engine at the end of `--shutdown-timeout`, whether answers or tiers last."""
    pod, unit = _pod(), UNIT.read_text()
    (engine,) = pod["containers"]
    (in_pod,) = (e["value"] for e in engine["env"] if e["name"] == "SHUTDOWN_TIMEOUT")
    (by_default,) = re.findall(r"SHUTDOWN_TIMEOUT:-(\d+)", (DEPLOY / "serve").read_text())
    (in_unit,) = re.findall(r"SHUTDOWN_TIMEOUT=(\d+)", unit)
    pause = int(engine["lifecycle"]["preStop"]["exec"]["command"][-1])
    (stop,) = re.findall(r"TimeoutStopSec=(\d+)", unit)
    grace = yaml.safe_load(COMPOSE.read_text())["services"]["engine"]["stop_grace_period"]
    least = REQUESTS + DRAIN * max(len(chain["tiers"]) for chain in _chains())
    for timeout, waits in (
        (in_pod, pod["terminationGracePeriodSeconds"] - pause),
        (by_default, 60 * int(grace.removesuffix("m"))),
        (in_unit, int(stop)),
    ):
        assert least <= int(timeout) < waits


def test_a_pods_folder_stays_its_users_alone() -> None:
    """Else the kubelet gives a tier's folder to a group at each start, and the tier is refused."""
    assert _pod()["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_a_pods_disk_may_be_a_local_volume() -> None:
    """Their usual provisioner offers this mode; ReadWriteOncePod is for CSI drivers alone."""
    (claim,) = _objects()["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]


def test_files_that_are_copied_or_mounted_exist() -> None:
    root = DEPLOY.parent
    copied = re.findall(r"^COPY (?:--\S+ )?(.+) \S+$", CONTAINERFILE.read_text(), re.M)
    assert copied and all((root / one).exists() for line in copied for one in line.split())
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    mounts = [one for service in services.values() for one in service.get("volumes", ())]
    files = [one.split(":")[0] for one in mounts if one.startswith(".")]
    assert len(files) == 3 and all((COMPOSE.parent / one).exists() for one in files)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A folder of commands, the first on PATH."""
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


def _command(path: Path, name: str, text: str) -> None:
    (path / name).write_text(f"#!/bin/sh\n{text}\n")
    (path / name).chmod(0o755)


def _run(path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": f"{path}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("found", "starts"), [(0, True), (1, True), (2, False), (127, False)])
def test_a_wrong_chain_alone_keeps_an_engine_from_its_start(
    path: Path, found: int, starts: bool
) -> None:
    _command(path, "kvtiers", f"exit {found}")
    (doctor,) = _pod()["initContainers"]
    unit = re.findall(r"^ExecStartPre=/bin/sh -c '(.*)'$", UNIT.read_text(), re.M)[0]
    for command in (doctor["command"], ["sh", "-c", unit.replace("$$", "$")]):
        assert (_run(path, *command).returncode == 0) == starts


def test_serve_hands_over_chain_model_and_options(path: Path, tmp_path: Path) -> None:
    _command(path, "vllm", 'for each in "$@"; do echo "$each"; done')
    chain = tmp_path / "a chain.yaml"
    chain.write_text("version: 1\ntiers:\n  - {type: cpu, capacity: 1GiB}\n")
    done = _run(path, str(DEPLOY / "serve"), str(chain), "/a model", "--port", "8001")
    assert done.returncode == 0, done.stderr
    given = done.stdout.splitlines()
    assert given[:3] == ["serve", "/a model", "--kv-transfer-config"]
    assert str(chain) in given[3] and given[4:] == ["--shutdown-timeout", "90", "--port", "8001"]
    chain.write_text("version: 1\ntiers:\n  - {type: cpu}\n")
    refused = _run(path, str(DEPLOY / "serve"), str(chain), "/a model")
    assert refused.returncode == 2 and "capacity" in refused.stderr and not refused.stdout
