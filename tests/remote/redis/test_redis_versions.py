"""redis-py's privates, which `remote/redis/pools.py` relies on, in the oldest version we claim.

The other tests run with the version installed, as a rule the newest that we claim.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OLDEST = "5.3.0"
NEWEST = "8.1"
USES_PRIVATES = [
    "test_redis_store.py",
    "test_stream.py",
    "test_pools.py",
    "test_tls.py",
]


def test_the_versions_claimed_are_those_tested() -> None:
    (claimed,) = re.findall(r'"redis(.*)"', (ROOT / "pyproject.toml").read_text())
    major, minor = map(int, NEWEST.split("."))
    assert claimed == f">={OLDEST.removesuffix('.0')},<{major}.{minor + 1}"
    assert (5, 3) <= tuple(map(int, version("redis").split(".")[:2])) <= (major, minor)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_the_oldest_version_works(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
    installed = subprocess.run([*pip, "--target", str(tmp_path), f"redis=={OLDEST}"], check=False)
    if installed.returncode:
        pytest.skip(f"redis {OLDEST} can't be installed here")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ask = [sys.executable, "-c", "import redis; print(redis.__version__)"]
    assert subprocess.check_output(ask, env=environment, text=True).strip() == OLDEST
    files = [str(Path(__file__).with_name(name)) for name in USES_PRIVATES]
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    subprocess.run(tests, cwd=ROOT, env=environment, check=True)
