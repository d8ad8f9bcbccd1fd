"""Modes that the disk tests run in."""

from __future__ import annotations

import pytest

from tests.disk import audit as disk_audit


@pytest.fixture(params=["buffered none", "direct none"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """`io` and `durability` of every store that `open_disk` opens, in child processes too."""
    chosen: str = request.param
    monkeypatch.setenv(disk_audit.MODE, chosen)
    return chosen
