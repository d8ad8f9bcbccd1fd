"""docs/data.md shows what its commands print."""

from __future__ import annotations

import random
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Ran
from tests.cli.conftest import kvtiers as kvtiers  # the fixture
from tests.data.test_inspection import NOTE, note_of
from tests.data.test_verification import PAYLOAD, chain_of, flip
from tests.disk import audit as disk
from tiers.records import NamespaceNote

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def steady(text: str) -> str:
    """The text without speeds and ages, which no two runs share."""
    return re.sub(r"[\d.]+[KMGT]?i?B/s|\d+s( ago)?", "N", text)


def shown(page: str) -> list[tuple[list[str], str]]:
    """The commands of a page's console blocks, each with what it prints."""
    blocks = "".join(re.findall(r"^```console\n(.*?)^```$", page, re.M | re.S))
    found = re.findall(r"^\$ kvtiers (.*)\n((?:(?!\$ ).*\n)*)", blocks, re.M)
    return [(shlex.split(command), printed) for command, printed in found]


def test_commands_print_what_the_page_shows(
    tmp_path: Path, kvtiers: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain_of(tmp_path / "chain")
    chain_of(tmp_path / "other-host")
    ended = b"generation-16-byblock"
    with disk.opened(tmp_path / "chain", slots=100) as store:
        disk.put(store, [*disk.keys(*range(90)), ended], PAYLOAD)
        note = NamespaceNote(**{**vars(NOTE), "opened": time.time(), "salted": False})
        note_of(tmp_path / "chain", disk.key(0), note)
        note_of(tmp_path / "chain", ended, NamespaceNote(**{**vars(note), "lasts": False}))
        flip(tmp_path / "chain", [7], random.Random(4))
    monkeypatch.chdir(tmp_path)
    commands = shown(PAGE.read_text())
    assert len(commands) >= 6
    for command, printed in commands:
        assert steady(kvtiers(*command).out) == steady(printed), command
