"""What README.md and docs/operations.md show works as it is shown."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple, cast

import pytest

from spec.load import load_chain
from spec.offloading import STAGING
from tiers.connector.scheduler.open_tier import log_chain, log_host, log_store
from tiers.cpu.spec import CpuSpec
from tiers.disk.spec import DiskSpec
from tiers.host.slots import slots_within
from tiers.remote.spec import RedisSpec
from tiers.store import TierStore, Usage

README = Path(__file__).parent.parent / "README.md"
NO_SERVER = ("validate", "config", "schema", "--help", "--version")
"""What `kvtiers` can be followed by to be run here; the rest takes an engine or a network."""


class Shown(NamedTuple):
    """A fenced block: its language and text, and the line of its fence."""

    language: str
    text: str
    line: int


def blocks(readme: str) -> list[Shown]:
    """The fenced blocks of a Markdown text."""
    fence = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", re.M | re.S)
    return [
        Shown(found[1], found[2], readme.count("\n", 0, found.start()) + 1)
        for found in fence.finditer(readme)
    ]


def is_chain(block: Shown) -> bool:
    """Whether a block is a whole chain."""
    lines = [line for line in block.text.splitlines() if line and not line.startswith("#")]
    return block.language in ("yaml", "yml") and lines[:1] != [] and lines[0].startswith("version:")


def commands(block: Shown) -> list[str]:
    """The `kvtiers` commands of a shell block that can run here, also those inside `$(...)`."""
    if block.language not in ("sh", "bash", "shell", "console"):
        return []
    lines = [line.removeprefix("$ ") for line in block.text.replace("\\\n", " ").splitlines()]
    whole = [line for line in lines if line.startswith("kvtiers ")]
    inner = [found for line in lines for found in re.findall(r"\$\((kvtiers [^)]*)\)", line)]
    return [command for command in whole + inner if command.split()[1] in NO_SERVER]


SHOWN = blocks(README.read_text()) if README.exists() else []
CHAINS = [block for block in SHOWN if is_chain(block)]
OPERATIONS = README.parent / "docs" / "operations.md"
COMMANDS = [
    (f"{page.stem} {block.line}", command)
    for page in (README, OPERATIONS)
    for block in blocks(page.read_text())
    for command in commands(block)
]


def test_pages_show_a_chain_and_commands() -> None:
    assert CHAINS and {where.split()[0] for where, _ in COMMANDS} == {"README", "operations"}


def test_the_first_screen_has_the_factors_of_the_demo() -> None:
    page = README.read_text()
    said = re.search(r"\[(\d+), (\d+) and (\d+) times faster\]", page)
    found = re.findall(r"\| (\d+)\.\dx \|", page)
    assert said is not None and list(said.groups()) == found


@pytest.mark.parametrize("block", CHAINS, ids=lambda block: f"line {block.line}")
def test_chains_validate(tmp_path: Path, block: Shown) -> None:
    path = tmp_path / "chain.yaml"
    path.write_text(block.text)
    load_chain(path)


@pytest.mark.parametrize(
    "command", [command for _, command in COMMANDS], ids=[line for line, _ in COMMANDS]
)
def test_commands_run(tmp_path: Path, command: str) -> None:
    """Every chain that a command names is the first one shown."""
    for name in re.findall(r"[\w.-]+\.ya?ml", command):
        (tmp_path / name).write_text(CHAINS[0].text)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


class Told:
    """As much of an open store as its log line tells."""

    def __init__(self, place: str, usage: Usage | None) -> None:
        self._place = place
        if usage is not None:
            self.usage = lambda: usage

    def describe(self) -> str:
        return self._place


def test_the_log_lines_are_those_of_the_chain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first chain shown, with blocks of 2 MiB on one rank, and a disk tier that holds some."""
    caplog.set_level("INFO")
    path = tmp_path / "chain.yaml"
    path.write_text(CHAINS[0].text)
    chain = load_chain(path)
    cpu, disk, remote = chain.tiers
    assert isinstance(cpu, CpuSpec) and isinstance(disk, DiskSpec)
    assert isinstance(remote, RedisSpec)
    log_chain(chain, 2 << 20, 1, slots_within(cpu.capacity + STAGING, 2 << 20, 1))
    log_host(chain, cpu, slots_within(cpu.capacity, 2 << 20, 1))
    held = Usage(61440, 61440 * (2 << 20), disk.capacity)
    told = Told(f"{disk.path}, io direct, durability none", held)
    log_store(chain, disk, [], cast(TierStore, told))
    log_store(chain, remote, [], cast(TierStore, Told(str(remote.url), None)))
    (shown,) = [block.text for block in SHOWN if block.language == "text"]
    assert shown.splitlines() == caplog.messages


def test_what_is_looked_for_is_found() -> None:
    text = """\
# Title
```yaml
# a comment
version: 1
tiers: []
```
```yaml
other: 1
```
```sh
$ kvtiers validate chain.yaml
kvtiers top
vllm serve model \\
  --kv-transfer-config "$(kvtiers config chain.yaml)"
make demo
```
"""
    chain, other, shell = blocks(text)
    assert (chain.line, is_chain(chain), is_chain(other)) == (2, True, False)
    assert commands(shell) == ["kvtiers validate chain.yaml", "kvtiers config chain.yaml"]
    assert commands(chain) == []
