"""The versions of vLLM that are served; any other is refused with one error."""

from __future__ import annotations

import re

from spec.errors import KVTiersError

OLDEST = (0, 29)
NEWEST = (0, 33)
SUPPORTED = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
"""The range as text. A test compares it with `pyproject.toml` and the README."""


class UnsupportedEngine(KVTiersError, RuntimeError):
    """This kvtiers does not serve the engine's version."""


def release_of(found: str) -> tuple[int, int] | None:
    """The release of vLLM's own version text; None: it does not say which it is."""
    numbers = re.match(r"(\d+)\.(\d+)", found)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def check_version(found: str) -> None:
    """Raise UnsupportedEngine unless `found`, vLLM's own version text, is served."""
    version = release_of(found)
    if version is not None and OLDEST <= version <= NEWEST:
        return
    newer = version is not None and version > NEWEST
    remedy = "a newer kvtiers, if there is one, or an older vLLM" if newer else "a newer vLLM"
    if version is None:
        remedy = "a release of vLLM, since this build does not say which it is"
    raise UnsupportedEngine(
        f"kvtiers serves vLLM {SUPPORTED} and found {found!r}. Install {remedy}: "
        f'pip install "vllm>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"'
    )
