"""Pages whose commands were run: each command's output stands below it as it came.

    python -m docs.shown

In a page, a `yaml` or `json` block whose first line is a comment with a file's name is that file. A
`console` block has commands, each behind `$ `, and what they print. All of a page's commands run in
one folder, in order. This writes the outputs into the pages; a test compares them, but for what
hangs on a machine's speed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "docs" / "tuning.md",)
_BLOCK = re.compile(r"^```(yaml|console)\n(.*?)^```$", re.M | re.S)
_FILE = re.compile(r"# ([\w.-]+\.(?:yaml|json))\n")
_TIMES = re.compile(r"^( +ms:) .*$|; [\d.]+ ms \(.*\)$", re.M)
_BY_TIER = re.compile(
    r"(?:[\d,]+ (?:from )?cpu(?:,| \+) )?[\d,]+ (?:from )?disk|[\d,]+ (?:from )?cpu(?= \+)"
    r"|^ +(?:cpu|disk): \d+ tokens, (?:it loaded the|another tier serves these) blocks",
    re.M,
)


def executed(page: str, folder: Path) -> str:
    """The page with the outputs that its commands have in a folder. Raises RuntimeError for a
    command that fails."""

    def replace(block: re.Match[str]) -> str:
        language, text = block[1], block[2]
        if language == "console":
            text = "".join(f"$ {one}\n{_output(one, folder)}" for one in commands(text))
        elif named := _FILE.match(text):
            (folder / named[1]).write_text(text, encoding="utf-8")
        return f"```{language}\n{text}```"

    return _BLOCK.sub(replace, page)


def without_speeds(text: str) -> str:
    """The text without what no two runs share: the milliseconds that `kvtiers explain` tells, and
    how much of a load each of two tiers had, which share it by their speed, or one of them has it
    all. Their sum stays."""

    def summed(found: re.Match[str]) -> str:
        counts = [int(one.replace(",", "")) for one in re.findall(r"\d[\d,]*\d|\d", found[0])]
        return "" if "blocks" in found[0] else str(sum(counts))

    return _BY_TIER.sub(summed, _TIMES.sub(r"\1", text))


def commands(text: str) -> list[str]:
    """The commands of a console block; one may go on behind a backslash."""
    whole = re.findall(r"^\$ ((?:.*\\\n)*.*)$", text, re.M)
    return [str(one) for one in whole]


def _output(command: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{command}: status {done.returncode}: {done.stderr}")
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    return "".join(f"{line}\n" for line in lines)


def main() -> None:
    """Write the outputs into the pages."""
    for page in PAGES:
        with TemporaryDirectory() as folder:
            page.write_text(executed(page.read_text(), Path(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
