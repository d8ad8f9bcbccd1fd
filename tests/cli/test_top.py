"""`kvtiers top` over engines in this process, as textual draws it on 80x24."""

from __future__ import annotations

import asyncio
import fcntl
import html
import os
import pty
import re
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from tests.cli.test_apply import stepping
from tests.cli.test_main import KVTIERS
from tests.cli.test_status import STATUS, TIER
from tests.support.changing import changes_of
from tests.support.replay import ReplayEngine
from tests.support.replay_chains import cpu, disk
from tiers.cli import arguments, top_screen
from tiers.cli.top_screen import Top
from tiers.control.control_server import ControlServer, short_path
from tiers.control.watch_engines import HANGS, EnginesWatch, Watched

Run = Callable[..., tuple[int, str, str]]
Engine = Callable[..., ReplayEngine]
Script = Callable[[Pilot[None]], Awaitable[None]]


@pytest.fixture(autouse=True)
def drawn_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A screen shows soon what has changed."""
    monkeypatch.setattr(top_screen, "REDRAWN", 0.1)


def screen(pilot: Pilot[None]) -> list[str]:
    """The lines of the screen."""
    svg = pilot.app.export_screenshot()
    lines: dict[int, dict[float, str]] = {}
    for x, line, text in re.findall(r'<text[^>]* x="([\d.]+)"[^>]*line-(\d+)\)"[^>]*>(.*?)<', svg):
        lines.setdefault(int(line), {})[float(x)] = html.unescape(text).replace("\xa0", " ")
    cell = 12.2
    drawn = []
    for place in range(24):
        row = ""
        for x, text in sorted(lines.get(place, {}).items()):
            row = row.ljust(round(x / cell)) + text
        drawn.append(row.rstrip())
    return drawn


def whole(lines: list[str]) -> str:
    """What stands there, in one line."""
    return " ".join(" ".join(lines).split())


async def shows(pilot: Pilot[None], *texts: str, times: int = 1) -> list[str]:
    """Wait until the screen has all of the texts, each perhaps over two lines, so many times; fails
    with the screen where it never does."""
    until = time.monotonic() + 60
    while True:
        lines = screen(pilot)
        if all(whole(lines).count(text) >= times for text in texts):
            return lines
        assert time.monotonic() < until, "\n".join(["", *texts, "", *lines])
        await pilot.pause(0.02)


def press(pilot: Pilot[None], *keys: str) -> None:
    """As `pilot.press`, which waits for the process to be idle: beside an engine that steps, a
    second for each key."""
    for key in keys:
        pilot.app.simulate_key(key)


async def open_account(pilot: Pilot[None]) -> None:
    """Press enter once a request takes it; a table that was hidden takes keys from the next redraw
    on."""
    until = time.monotonic() + 60
    while not isinstance(pilot.app.focused, top_screen.RequestRows):
        assert time.monotonic() < until, "no request takes keys"
        await pilot.pause(0.02)
    await pilot.press("enter")


def play(folder: Path, script: Script, engine: str | None = None) -> None:
    """Run `top` on 80x24 with a script's keys."""
    watch = EnginesWatch(folder, engine, seconds=0.05)

    async def run() -> None:
        async with Top(watch).run_test(size=(80, 24)) as pilot:
            await script(pilot)

    try:
        asyncio.run(run())
    finally:
        watch.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Make sockets in a folder, `control` of the test's, that answer what a test likes."""
    with ExitStack() as stack:

        def make(name: str, status: object, explain: object = ()) -> Path:
            verbs: dict[str, Any] = {"status": lambda _: status, "explain": lambda _: explain}
            server = ControlServer(tmp_path / "control", name, verbs)
            stack.callback(server.close)
            return server.path

        yield make


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[str]:
    """The name of an engine that takes questions and does not answer."""
    folder = tmp_path / "control"
    folder.mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listening, short_path(folder / "hung.sock") as short:
        listening.bind(short)
        listening.listen()
        yield "hung"


def test_tiers_and_requests_are_on_a_screen_of_80_columns(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    tiers = (
        cpu(4),
        disk(tmp_path / "disk"),
        disk(tmp_path / "file", name="a-name-of-26-letters-in-all"),
    )
    made = engine(*tiers, explain={})
    for _ in range(2):
        made.generate([*range(42)], 2)
        made.settle()

    async def script(pilot: Pilot[None]) -> None:
        lines = await shows(pilot, "queue", "cpu (cpu): 16K; reads and")
        place = next(place for place, line in enumerate(lines) if line.startswith(" tier "))
        heads, *rows = lines[place : place + 4]
        assert heads.split()[:5] == ["tier", "state", "fill", "share", "load/s"]
        assert heads.rstrip().endswith("queue"), "the last column is on the screen"
        assert [row.split()[1] for row in rows] == ["open", "open", "refused"]
        assert rows[0].split()[2:6] == ["100%", "of", "16K", "19.0%"]
        assert rows[2].split()[0].endswith("…")
        await shows(pilot, "since the start it loaded 19.0%", "blocks: ", " evicted")
        await pilot.press("down", "down")
        await shows(pilot, "a-name-of-26-letters-in-all (disk)", f"{tmp_path}"[:30])
        made.generate([*range(42)], 2)
        await shows(pilot, "126 prompt tokens")
        await shows(pilot, "a-name-of-26-letters-in-all (disk)")  # the cursor has stayed
        await pilot.press("r")
        lines = await shows(pilot, "request-1 finished 42", "last", "waited longest", "explain")
        assert "cpu 16, disk 24" in "\n".join(lines)
        await pilot.press("down", "enter")
        text = await shows(pilot, "request request-1: finished, 42 prompt tokens", "until begun")
        assert "42 tokens = 0 own cache + 16 cpu + 24 disk" in "\n".join(text)
        await pilot.press("escape", "r")
        await shows(pilot, "a-name-of-26-letters-in-all (disk)")
        await pilot.press("q")
        await pilot.pause()
        assert pilot.app.return_code == 0

    play(tmp_path / "control", script)


def test_an_engine_that_keeps_no_requests_says_what_to_write(
    engine: Engine, tmp_path: Path
) -> None:
    engine(cpu())

    async def script(pilot: Pilot[None]) -> None:
        await pilot.press("r")
        await shows(pilot, "write explain: {} into the engine's chain")

    play(tmp_path / "control", script)


def test_engines_hang_die_and_come_while_others_are_watched(
    engine: Engine, hung: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top_screen, "LATE", 0.2)
    others = set(threading.enumerate())  # a test before may have left some
    made = engine(cpu())
    folder = tmp_path / "control"
    status = STATUS.model_copy(update={"load_policy": "that of a victim"}).model_dump_json()
    code = (
        "import json, sys, time; from pathlib import Path\n"
        "from tiers.control.control_server import ControlServer\n"
        "found = json.loads(sys.argv[2])\n"
        "ControlServer(Path(sys.argv[1]), 'victim', {'status': lambda _: found})\n"
        "time.sleep(300)"
    )
    with subprocess.Popen([sys.executable, "-c", code, folder, status]) as victim:

        async def script(pilot: Pilot[None]) -> None:
            try:
                await shows(pilot, "(1 of 3)", f"engine engine-{os.getpid()}", "next engine")
                await pilot.press("right")
                await shows(pilot, f"engine {hung} (2 of 3)", "does not answer: it hangs")
                await pilot.press("right")
                await shows(pilot, f"engine victim-{victim.pid} (3 of 3)", "load policy that of")
            finally:
                victim.kill()
            await shows(
                pilot, "the engine is gone; this is its answer of", "disk degraded", "ghost disk ("
            )
            await pilot.press("left", "left")
            await shows(pilot, f"engine engine-{os.getpid()} (1 of 2)")
            made.generate([*range(42)], 2)
            await shows(pilot, "42 prompt tokens")
            began = [thread for thread in threading.enumerate() if thread not in others]
            named = [thread for thread in began if thread.name.startswith("kvtiers-watch")]
            assert len(named) == 4 and all(thread.daemon for thread in named), "q would wait"

        play(folder, script)


HOSTILE = "\x1b[2J[/bold][red]\n\u202e"
"""Moves a cursor, is markup that does not parse, begins a line."""


def test_names_move_no_cursor_and_are_no_markup(serve: Callable[..., Path], tmp_path: Path) -> None:
    tier = TIER.model_copy(update={"name": HOSTILE, "why": HOSTILE, "dropped_blocks": {HOSTILE: 1}})
    status = STATUS.model_copy(update={"tiers": [tier], "load_policy": HOSTILE})
    attempt = {"own_cache": 0, "computed": 1, "loaded": {HOSTILE: 2}, "milliseconds": {}}
    times = dict.fromkeys(top_screen.WAITS, 0.5)
    account = {"request": HOSTILE, "state": HOSTILE, "prompt_tokens": 3}
    accounts = [{**account, "attempts": [{**attempt, "milliseconds": times}]}]
    path = serve("a", status.model_dump(mode="json"), accounts)
    path.rename(path.with_name(f"a{HOSTILE.replace('/', '')}.sock"))

    async def script(pilot: Pilot[None]) -> None:
        shown = "\\x1b[2J[/bold][red]\\n\\u202e"
        lines = await shows(pilot, f"load policy {shown}", f"{shown} (disk)", f"dropped ({shown})")
        assert not any(c in "".join(lines) for c in "\x1b\u202e")
        await pilot.press("r")
        await shows(pilot, f"{shown} 2"[:20])

    play(tmp_path / "control", script)


def test_what_was_loaded_is_not_cut_where_requests_scroll(
    serve: Callable[..., Path], tmp_path: Path
) -> None:
    """A number that lost its last digits would be read as another."""
    times = dict.fromkeys(top_screen.WAITS, 100.0)
    loaded = {"cpu": 256, "disk": 352}
    attempt = {"own_cache": 0, "computed": 38, "loaded": loaded, "milliseconds": times}
    account = {"state": "length_capped", "prompt_tokens": 646, "attempts": [attempt]}
    accounts = [{**account, "request": f"chatcmpl-{n:08}"} for n in range(30)]
    serve("a", STATUS.model_dump(mode="json"), accounts)

    async def script(pilot: Pilot[None]) -> None:
        await pilot.press("r")
        lines = await shows(pilot, "length_capped")
        shown = [line for line in lines if "length_capped" in line]
        assert shown and all("cpu 256, disk 352" in line for line in shown), shown

    play(tmp_path / "control", script)


def test_three_tiers_that_loaded_leave_room_for_the_requests_name(
    serve: Callable[..., Path], tmp_path: Path
) -> None:
    times = dict.fromkeys(top_screen.WAITS, 400.0)
    loaded = {"cpu": 2560, "disk": 3520, "redis": 640}
    attempt = {"own_cache": 0, "computed": 38, "loaded": loaded, "milliseconds": times}
    account = {"state": "finished", "prompt_tokens": 6758, "attempts": [attempt]}
    name = "chatcmpl-0123456789abcdef0123456789abcdef-0-01234567"
    serve("a", STATUS.model_dump(mode="json"), [{**account, "request": name}] * 30)

    async def script(pilot: Pilot[None]) -> None:
        await pilot.press("r")
        lines = await shows(pilot, "finished", "6720 cpu+disk+redis")
        assert any(line.startswith(f" {name[:14]}") for line in lines), lines

    play(tmp_path / "control", script)


@pytest.mark.parametrize("status", [{"version": "9"}, [], None])
def test_a_status_of_another_version_is_named(
    serve: Callable[..., Path], tmp_path: Path, status: object
) -> None:
    serve("new", status)

    async def script(pilot: Pilot[None]) -> None:
        await shows(pilot, "engine new-", "its answer is another version's")

    play(tmp_path / "control", script)


BAD_ACCOUNTS = [
    {"request": "a"},
    {"request": "b", "state": 1, "prompt_tokens": "x", "attempts": []},
    {"request": "c", "attempts": [5]},
]


def test_a_selected_tier_says_what_its_row_lacks() -> None:
    sums = {
        "lookups": 1200.0,
        "hits": 900.0,
        "recompute_preferred": 30.0,
        "recompute_preferred_engine": 4.0,
        "recompute_late": 3.0,
        "lookup_timeouts": 1.0,
        "tier_failures": 2.0,
    }
    tier = TIER.model_copy(update={"sums": sums})
    assert [*top_screen.tier_lines(tier)] == [
        "disk (disk): 50G; see below",
        "writes are down: OSError: No space left on device",
        "blocks: 1,200 dropped (budget)",
        "since the start it loaded 50.0% of the prompts' tokens",
        "a load takes 1 ms, then 3G/s, as measured",
        "requests: 1,200 that looked it up, 900 that loaded, 30 that computed sooner, 4 too short "
        "to load, 3 that could not wait so long, 1 whose lookup was given up",
        "operations that failed: 2",
    ]
    nothing = dict.fromkeys(("token_share", "load_latency_seconds"))
    idle = tier.model_copy(update={"state": "open", "why": "", "sums": {}, **nothing})
    assert [*top_screen.tier_lines(idle)] == [
        "disk (disk): 50G; reads and writes work",
        "blocks: 1,200 dropped (budget)",
    ]


def test_a_request_is_a_row_of_its_last_attempt_and_of_all_its_waits() -> None:
    waits = dict.fromkeys(top_screen.WAITS, 1.0)
    first = {
        "own_cache": 1000,
        "computed": None,
        "loaded": {"cpu": 0},
        "milliseconds": {**waits, "lookup": None, "step": 50.0},
    }
    last = {
        "own_cache": 2000,
        "computed": 30,
        "loaded": {"cpu": 16, "disk": 0, "redis": 4},
        "milliseconds": waits,
    }
    account: Any = {"request": "a", "state": "finished", "prompt_tokens": 12345}

    def cells(*attempts: object) -> tuple[str, ...]:
        row = top_screen.request_row({**account, "attempts": [*attempts]})
        assert row[:3] == ("a", "finished", "12,345")
        return row[3:]

    assert cells(first, last) == ("2,000", "30", "7.0", "cpu 16, redis 4")
    assert cells(first) == ("1,000", "-", "3.0", "")
    assert cells() == ("0", "-", "0.0", "")
    assert len(top_screen.keyed([{**account, "began": 1}, {**account, "began": 2}])) == 2


def test_an_answer_that_is_old_is_said() -> None:
    seen = Watched(Path("a.sock"), since=100.0, status=STATUS)
    ago = "; this is its answer of {}s ago"
    assert top_screen.problem(seen, 104.0) == ""
    assert top_screen.problem(seen, 104.5) == HANGS + ago.format(4)
    failed = replace(seen, problem="it failed")
    assert top_screen.problem(failed, 101.0) == "it failed" + ago.format(1)
    assert top_screen.problem(replace(failed, is_gone=True), 103.0).endswith(ago.format(3))
    for new, text in ((failed, "it failed"), (seen, "the engine is asked")):
        assert top_screen.problem(replace(new, status=None), 101.0) == text


@pytest.mark.parametrize("explain", [{}, [5], BAD_ACCOUNTS], ids=str)
def test_accounts_of_another_version_are_named(
    serve: Callable[..., Path], tmp_path: Path, explain: object
) -> None:
    serve("new", STATUS.model_dump(mode="json"), explain)

    async def script(pilot: Pilot[None]) -> None:
        await pilot.press("r")
        await shows(pilot, "another version")
        if explain == BAD_ACCOUNTS:
            count = 2 * len(BAD_ACCOUNTS)
            lines = await shows(pilot, "an answer of another version", times=count)
            assert "\n".join(lines).count("an answer of another version") == count
            await open_account(pilot)
            await shows(pilot, "│ an answer of another version")

    play(tmp_path / "control", script)


def test_requests_take_keys_again_behind_an_engine_without_requests(
    serve: Callable[..., Path], tmp_path: Path
) -> None:
    for name, accounts in (("a", BAD_ACCOUNTS), ("b", [])):
        serve(name, STATUS.model_dump(mode="json"), accounts)

    async def script(pilot: Pilot[None]) -> None:
        await pilot.press("r")
        await shows(pilot, "an answer of another version")
        await pilot.press("right")
        await shows(pilot, "no request yet")
        await pilot.press("left")
        await shows(pilot, "an answer of another version")
        await open_account(pilot)
        await shows(pilot, "│ an answer of another version")

    play(tmp_path / "control", script)


def test_on_a_terminal_it_draws_and_q_ends_it(engine: Engine, tmp_path: Path) -> None:
    engine(cpu())
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    before = termios.tcgetattr(theirs)
    arguments = [KVTIERS, "top", "--folder", str(tmp_path / "control")]
    environment = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(
        arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    drawn = b""
    while b"reads and writes work" not in drawn:
        drawn += os.read(ours, 1 << 16)
    os.write(ours, b"q")
    while b"\x1b[?1049l" not in drawn:  # the terminal's own screen comes back
        drawn += os.read(ours, 1 << 16)
    assert process.wait() == 0
    assert termios.tcgetattr(theirs) == before
    for end in (ours, theirs):
        os.close(end)


def test_where_it_can_not_draw_it_says_why(
    kvtiers: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, err = kvtiers("top", "--folder", tmp_path)
    assert (status, out) == (2, "") and "use `kvtiers status`" in err
    monkeypatch.setattr(arguments, "find_spec", lambda name: None)
    status, out, err = kvtiers("top", "--folder", tmp_path)
    assert (status, out) == (1, "")
    assert err == "textual is not installed, which this needs: pip install 'kvtiers[top]'\n"


def test_what_comes_while_it_closes_is_drawn_on_no_screen(engine: Engine, tmp_path: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await shows(pilot, "cpu")
        assert isinstance(pilot.app, Top)
        screens, pilot.app._screen_stack[:] = pilot.app.screen_stack, []
        pilot.app.draw()
        pilot.app._screen_stack[:] = screens

    with stepping(engine(cpu())):
        play(tmp_path / "control", script)


def test_a_tier_is_paused_by_a_key_that_is_pressed_twice(engine: Engine, tmp_path: Path) -> None:
    running = engine(cpu(), disk(tmp_path / "disk"))

    async def script(pilot: Pilot[None]) -> None:
        await shows(pilot, "cpu", "disk")
        press(pilot, "down", "p")
        await shows(pilot, "press the key again within 5 s: tier disk neither loads nor stores")
        assert changes_of(running).version == 1, "once is a slip"
        press(pilot, "p")
        lines = await shows(pilot, "tier disk is paused: both", "disk paused", "see below")
        assert "p pause" in lines[-1]
        press(pilot, "r")
        assert "p pause" not in (await shows(pilot, "requests or tiers", "explain"))[-1]
        press(pilot, "r")
        press(pilot, "p")
        await shows(pilot, "tier disk goes on")
        press(pilot, "p")
        await shows(pilot, "reads and writes work")

    with stepping(running):
        play(tmp_path / "control", script)
    assert changes_of(running).version == 3
    assert not any(tier.paused for tier in changes_of(running).chain.tiers)
