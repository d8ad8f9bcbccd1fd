"""Fuzzing with atheris, which follows what the code covers.

    python -m tests.fuzz TARGET [OPTION]

From a checkout, after `pip install atheris`; the targets are those of `test_fuzz.py`, the
options libFuzzer's: `-max_total_time=60`, a folder to keep inputs in.
"""

from __future__ import annotations

import sys

import atheris


def main() -> None:
    """Fuzz one target until libFuzzer's options end it, or an input breaks it."""
    with atheris.instrument_imports(include=["tests", "spec", "tiers", "yaml"]):
        from tests.test_fuzz import TARGETS
    target = TARGETS.get(sys.argv[1] if sys.argv[1:] else "")
    if target is None:
        sys.exit(f"name a target: {', '.join(TARGETS)}")
    atheris.Setup([sys.argv[0], *sys.argv[2:]], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
