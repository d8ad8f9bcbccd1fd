"""No command shows a secret that a chain refers to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SECRET = "s3same-0pen"


@pytest.mark.parametrize("kind", ["env", "file"])
@pytest.mark.parametrize("command", ["validate", "config", "schema", "validate broken"])
def test_no_command_shows_a_secret(
    kvtiers: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
    command: str,
) -> None:
    monkeypatch.setenv("OUR_SECRET", SECRET)
    (tmp_path / "secret").write_text(SECRET)
    where = {"env": "OUR_SECRET", "file": str(tmp_path / "secret")}[kind]
    tier: dict[str, Any] = {"type": "redis", "url": "redis://cache", "username": "engine"}
    tier["password"] = {kind: where}
    if "broken" in command:
        tier["timeout"] = "soon"
    path = tmp_path / "chain.yaml"
    path.write_text(json.dumps({"version": 1, "tiers": [tier]}))
    ran = kvtiers(command.split()[0], *([] if command == "schema" else [path]))
    assert ran.status == (2 if "broken" in command else 0)
    assert SECRET not in ran.out + ran.err
    if command == "validate":
        assert f"password ({kind} {where})" in ran.out


@pytest.mark.parametrize("how", [[], ["--json"]])
def test_a_setting_that_looks_like_a_secret_is_masked(
    kvtiers: Callable[..., Any], tmp_path: Path, how: list[str]
) -> None:
    """A plugin's settings may be URLs: here a path has what such a one ends with."""
    path = tmp_path / "chain.yaml"
    place = f"/srv/kv?token={SECRET}"
    tier = {"type": "disk", "path": place, "capacity": "1GiB"}
    for folder, status in (("/srv/trace", 0), ("/srv/kv", 2)):
        record = {"path": f"{folder}?token={SECRET}"}
        path.write_text(json.dumps({"version": 1, "tiers": [tier], "record": record}))
        ran = kvtiers("validate", path, *how)
        assert ran.status == status and SECRET not in ran.out + ran.err
        assert (ran.out + ran.err).count("?token=***") == (1 if status else 2)
