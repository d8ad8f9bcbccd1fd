"""Folders that a disk tier refuses, and file systems of a test's own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from spec.offloading import StoreContext
from tests.support.disk_audit import PAYLOAD, SLOT, run_code
from tiers.disk.spec import DiskSpec
from tiers.errors import TierNotOpen, TierUnusable


def run_mounted(mount: str, code: str, path: Path) -> None:
    """Run Python after a mount that only its process sees."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0:
        pytest.skip("this user can't mount anything")
    run_code(code, path, within=["unshare", "-m", "sh", "-c", f'{mount} && exec "$0" "$@"'])


def refused(path: Path, match: str, capacity: int = 8 * SLOT, shares: int = 1) -> None:
    """Opening must fail with a message that matches and names the path."""
    spec = DiskSpec(path=path, capacity=capacity)
    with pytest.raises((TierUnusable, TierNotOpen), match=match) as caught:
        spec.open(StoreContext(PAYLOAD, shares))
    assert str(path) in str(caught.value)
