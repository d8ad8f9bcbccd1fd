"""`kvtiers apply` against an engine in this process that serves meanwhile."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from spec.load import load_chain
from tests.support.changing import changes_of
from tests.support.plugin_packages import Install
from tests.support.replay import ReplayEngine
from tests.support.replay_chains import cpu, disk
from tiers.connector.multi import changes
from tiers.connector.scheduler.offloading_scheduler import OffloadingScheduler
from tiers.control import ask_engines, change_watch
from tiers.control.change_watch import Verdict
from tiers.control.control_server import ControlServer

Run = Callable[..., Any]
Engine = Callable[..., ReplayEngine]


@contextmanager
def stepping(engine: ReplayEngine) -> Iterator[None]:
    """Let the engine step on a thread, as one that serves does."""
    is_over = threading.Event()

    def step() -> None:
        while not is_over.wait(0.001):
            engine.step()

    thread = threading.Thread(target=step)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def written(folder: Path, *tiers: dict[str, Any], **more: Any) -> Path:
    chain = {
        "version": 1,
        "tiers": list(tiers),
        "staging": "256KiB",
        "load_when": "always",
        "control": {"folder": str(folder / "control")},
        **more,
    }
    path = folder / "new.yaml"
    path.write_text(yaml.safe_dump(chain))
    return path


def test_a_running_engine_takes_another_order(kvtiers: Run, engine: Engine, tmp_path: Path) -> None:
    a, b = cpu(capacity="1MiB"), disk(tmp_path / "disk")
    running = engine(a, b)
    folder: tuple[object, ...] = ()  # the chain says it
    dry = kvtiers("apply", written(tmp_path, b, a), "--dry-run", *folder)
    assert dry.status == 0 and "tier disk: kept, load priority 1 (now 2)" in dry.out
    assert changes_of(running).version == 1, "nothing is touched"
    with stepping(running):
        ran = kvtiers("apply", written(tmp_path, b, a), "--if-version", 1, *folder)
        assert ran.status == 0 and "its chain has version 2" in ran.out, ran.err
        again = kvtiers("apply", written(tmp_path, b, a), "--json", *folder)
        assert again.status == 0 and json.loads(again.out)["version"] == 2
        refused = kvtiers("apply", written(tmp_path, a, b), "--if-version", 1, *folder)
        assert refused.status == 1 and "has version 2, not 1" in refused.err
    status = kvtiers("status", "--folder", tmp_path / "control")
    assert "chain version 2" in status.out and status.out.index("disk") < status.out.index("cpu ")


def test_what_an_engine_says_moves_no_cursor(kvtiers: Run, tmp_path: Path) -> None:
    """As names of tiers and errors of plugins may."""
    odd = "\x1b[2J\r"
    over = {"version": 2, "over": True, "remains": [odd], "verdict_text": odd}
    over["verdict"] = {"outcome": "better"}
    answers = [{"why": odd, "lines": [odd]}, {"why": "", "lines": []}]
    verbs = {
        "status": dict,
        "apply": lambda _: {**over, **answers.pop(0), "diff": {"refused": []}, "change": 1},
        "change": lambda _: over,
    }
    with closing(ControlServer(tmp_path / "control", "odd", verbs)):
        ran = kvtiers("apply", written(tmp_path, cpu(capacity="1MiB")))
        assert (ran.out, ran.err) == ("\\x1b[2J\\r\n", "refused: \\x1b[2J\\r\n")
        ran = kvtiers("apply", written(tmp_path, cpu(capacity="1MiB")), "--watch", "1s")
        assert ran.status == 0 and ran.out.count("\\x1b[2J\\r") == 2 and "\x1b" not in ran.out


def test_an_engine_is_told_what_the_file_says_alone(kvtiers: Run, tmp_path: Path) -> None:
    """One of another version refuses a key that it does not know, also at its default."""
    told: list[dict[str, Any]] = []

    def answer(question: Mapping[str, Any]) -> dict[str, Any]:
        told.append(question["chain"])
        return {"why": "", "lines": [], "diff": {"refused": []}, "over": True}

    path = written(tmp_path, cpu(capacity="1MiB"), disk(tmp_path / "disk"))
    with closing(ControlServer(tmp_path / "control", "old", {"status": dict, "apply": answer})):
        assert kvtiers("apply", path, "--dry-run").status == 0
    (chain,), whole = told, yaml.safe_load(path.read_text())
    assert chain.keys() == whole.keys()
    for tier, as_written in zip(chain["tiers"], whole["tiers"], strict=True):
        assert tier.keys() == as_written.keys() | {"name"}
    assert load_chain(chain) == load_chain(path)


def test_a_change_is_watched(
    kvtiers: Run, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = cpu(capacity="1MiB"), disk(tmp_path / "disk")
    running = engine(a, b)
    folder = ("--folder", tmp_path / "control")
    with stepping(running):
        ran = kvtiers("apply", written(tmp_path, b, a), "--watch", "500ms", *folder)
    assert ran.status == 0, ran.err
    assert ran.out.splitlines()[-1] == (
        "there were too few requests, before it or after it, to judge it"
    )
    bad = kvtiers("apply", written(tmp_path, b, a), "--watch", "soon", *folder)
    assert bad.status == 2 and "--watch soon: " in bad.err
    long = kvtiers("apply", written(tmp_path, b, a), "--watch", "2h", *folder)
    assert long.status == 2 and "--watch 2h: an hour at most" in long.err
    same = kvtiers("apply", written(tmp_path, b, a), "--watch", "1h", *folder)
    assert same.status == 0 and "watched" not in same.out, "there is nothing to wait for"
    worse = Verdict(outcome="worse", before=0.3, after=0.1, margin=0.1)
    monkeypatch.setattr(change_watch, "compare", lambda before, after: worse)
    with stepping(running):
        ran = kvtiers("apply", written(tmp_path, a, b), "--watch", "500ms", *folder)
    assert ran.status == 1 and ran.out.endswith("; the chain of before is in effect again\n")


def test_a_change_in_part_is_none_that_was_refused(
    kvtiers: Run, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier that is to be opened anew does not close."""
    a, b = cpu(capacity="1MiB"), disk(tmp_path / "disk")
    running = engine(a, b)
    monkeypatch.setattr(changes, "DRAIN_SECONDS", 0.0)
    monkeypatch.setattr(change_watch, "CHANGE_SECONDS", 0.2)
    anew = written(tmp_path, a, {**b, "durability": "sync"})
    why = "changed in part: tier disk has not closed: the chain goes on without it\n"
    with stepping(running), monkeypatch.context() as busy:
        busy.setattr(OffloadingScheduler, "jobs_in_flight", 1)
        ran = kvtiers("apply", anew, "--watch", "1h")
    assert (ran.status, ran.err) == (1, why)
    assert "worse: it was made in part" in ran.out and "going back failed: tier disk" in ran.out
    assert changes_of(running).version == 2


def test_what_is_refused_and_what_is_bad(
    kvtiers: Run, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = cpu(capacity="1MiB"), disk(tmp_path / "disk")
    engine(a, b)
    folder = ("--folder", tmp_path / "control")
    refused = kvtiers("apply", written(tmp_path, a, b, salt="other"), *folder)
    assert refused.status == 1 and "refused: salt" in refused.out
    refused = kvtiers("apply", written(tmp_path, a, b, salt="other"), *folder, "--dry-run")
    assert refused.status == 1 and "refused: salt" in refused.out
    monkeypatch.setattr(ask_engines, "BEGIN_SECONDS", 0.2)
    idle = kvtiers("apply", written(tmp_path, b, a), *folder)
    assert idle.status == 1 and "refused: the engine made no step" in idle.err
    monkeypatch.setattr(ask_engines, "BEGIN_SECONDS", 5.0)
    monkeypatch.setattr(ask_engines, "MOST_SECONDS", 0.2)
    hangs = kvtiers("apply", written(tmp_path, b, a), *folder)
    assert hangs.status == 1 and "the change is not over yet" in hangs.err
    elsewhere = written(tmp_path, a, b, control={"folder": str(tmp_path / "elsewhere")})
    assert "no engine listens" not in kvtiers("apply", elsewhere, *folder, "--dry-run").err
    bad = kvtiers("apply", written(tmp_path, {"type": "disc"}), *folder)
    assert bad.status == 2 and "new.yaml" in bad.err
    engine(cpu(capacity="1MiB"))
    several = kvtiers("apply", written(tmp_path, a), *folder)
    assert several.status == 2 and "--to" in several.err


def test_a_secret_that_can_t_be_handed_over_is_refused(
    kvtiers: Run, plugin: Install, tmp_path: Path
) -> None:
    plugin(
        "veils",
        "from pydantic import SecretStr\nfrom spec.offloading import StoreSpec\n"
        "class VeilSpec(StoreSpec):\n    word: SecretStr | None = None\n    text: str = ''\n"
        "    def open(self, site): ...\n",
        veil="VeilSpec",
    )
    chain = tmp_path / "chain.yaml"
    said = "a secret in it can't be handed over"
    for tier, is_refused in (("word: open sesame", True), (f"text: '{'*' * 12}'", False)):
        chain.write_text(f"version: 1\ntiers:\n  - {{type: veil, {tier}}}\n")
        done = kvtiers("apply", chain, "--dry-run", "--folder", tmp_path)
        assert done.status and (said in done.err) == is_refused, done.err
        assert "sesame" not in done.out + done.err and "is broken" not in done.err
