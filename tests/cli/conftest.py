"""Running the kvtiers command in the tests' own process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.replay import ReplayEngine
from tests.support.replay_chains import MODEL, chain_of, close
from tiers.cli.main import main
from tiers.control.engine_control import Control


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


@pytest.fixture
def engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., ReplayEngine]]:
    """Make engines that can be asked in a folder, `control` of the test's."""
    with ExitStack() as stack:

        def make(*tiers: Any, **chain: Any) -> ReplayEngine:
            spec = chain_of(*tiers, control={"folder": str(tmp_path / "control")}, **chain)
            made = ReplayEngine(spec, MODEL, prefix_caching=False)
            stack.callback(close, made)
            assert made.connector is not None
            folder = tmp_path / "control"
            before = {*folder.glob("*.sock")}
            control = Control(spec, made.connector)
            stack.callback(control.close)
            take = made.connector.get_kv_connector_stats

            def observed() -> Any:
                stats = take()
                control.board.measured({"all": stats})
                return stats

            monkeypatch.setattr(made.connector, "get_kv_connector_stats", observed)
            until = time.monotonic() + 10
            while {*folder.glob("*.sock")} <= before and time.monotonic() < until:
                time.sleep(0.01)
            return made

        yield make
