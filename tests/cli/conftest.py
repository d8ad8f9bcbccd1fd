"""Running the kvtiers command in the tests' own process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from tiers.cli.main import main


class Ran(NamedTuple):
    """What a command left behind."""

    status: int
    out: str
    err: str


@pytest.fixture
def kvtiers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ran]:
    """Run the command with these arguments; an exception that would be a traceback fails."""

    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["kvtiers", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capsys.readouterr()
        return Ran(int(exit_.value.code or 0), out, err)

    return run
