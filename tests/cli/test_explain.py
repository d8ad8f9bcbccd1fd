"""`kvtiers explain` of an engine in this process."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.replay import ReplayEngine
from tests.support.replay_chains import cpu, disk
from tiers.control.control_server import short_path

Run = Callable[..., tuple[int, str, str]]


def test_it_tells_of_requests_by_name_the_last_and_the_slowest(
    kvtiers: Run, engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    folder = tmp_path / "control"
    made = engine(cpu(4), disk(tmp_path), explain={})
    for _ in range(2):
        made.generate([*range(42)], 2)
        made.settle()
    status, out, err = kvtiers("explain", "request-1", "--folder", folder)
    assert (status, err) == (0, "")
    assert out.splitlines()[:2] == [
        "request request-1: finished, 42 prompt tokens",
        "  42 tokens = 0 own cache + 16 cpu + 24 disk + 2 computed",
    ]
    status, out, _ = kvtiers("explain", "--last", "2", "--json", "--folder", folder)
    assert [json.loads(line)["request"] for line in out.splitlines()] == ["request-0", "request-1"]
    status, out, _ = kvtiers("explain", "--slowest", "1", "--from", "engine", "--folder", folder)
    assert (status, out.split()[1]) == (0, "request-1:")
    status, _, err = kvtiers("explain", "nobody", "--folder", folder)
    assert (status, err) == (1, "no engine knows such a request; the oldest ones are dropped\n")
    status, _, err = kvtiers("explain", "--last", "1", "--from", "another", "--folder", folder)
    assert status == 1 and "no engine is called 'another'" in err
    status, _, err = kvtiers("explain", "--last", "1", "--folder", tmp_path)
    assert status == 1 and "no engine listens" in err


def test_on_a_terminal_no_line_breaks_within_a_word(
    kvtiers: Run,
    engine: Callable[..., ReplayEngine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a tier answered takes up to 220 columns; where it is no terminal, scripts have it so."""
    made = engine(cpu(4), disk(tmp_path), explain={})
    made.generate([*range(42)], 2)
    made.settle()
    asked = "explain", "--last", "1", "--folder", tmp_path / "control"
    _, out, _ = kvtiers(*asked)
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda file: True)
    monkeypatch.setenv("COLUMNS", "60")
    _, folded, _ = kvtiers(*asked)
    assert max(map(len, out.splitlines())) > 60 >= max(map(len, folded.splitlines()))
    assert folded.split() == out.split()
    assert len(folded.splitlines()) > len(out.splitlines()), "and what goes on is indented"
    assert {line for line in folded.splitlines() if not line.startswith("  ")} == {
        out.splitlines()[0]
    }


def test_of_several_engines_each_is_named(
    kvtiers: Run, engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    """Their last requests looked like one engine's."""
    for _ in range(2):
        made = engine(cpu(4), explain={})
        made.generate([*range(42)], 2)
        made.settle()
    status, out, err = kvtiers("explain", "--last", "1", "--folder", tmp_path / "control")
    heads = [line.split()[0] for line in out.splitlines() if not line.startswith(" ")]
    assert (status, err, heads) == (0, "", ["engine", "request"] * 2)


def test_an_engine_that_keeps_nothing_says_what_to_write(
    kvtiers: Run, engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    engine(cpu())
    status, _, err = kvtiers("explain", "--last", "1", "--folder", tmp_path / "control")
    assert status == 1 and "write explain: {} into the engine's chain" in err


@pytest.fixture
def answering(tmp_path: Path) -> Iterator[Callable[[str, bytes], None]]:
    """Sockets of engines that answer with some bytes each."""
    with ExitStack() as stack:

        def answer(name: str, said: bytes) -> None:
            listening = stack.enter_context(socket.socket(socket.AF_UNIX))
            with short_path(tmp_path / name) as short:
                listening.bind(short)
            listening.listen()

            def serve() -> None:
                connection, _ = listening.accept()
                with connection:
                    connection.recv(1000)
                    connection.sendall(said)

            threading.Thread(target=serve, daemon=True).start()

        yield answer


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"[1]\n", "it answers: [1]"),
        (b"\xff\n", "can't decode byte 0xff"),
        (b"[" * 100_000, "while decoding a JSON array"),
        (
            b'{"answer": [{"request": "a"}]}\n',
            "engine a: its answer is another version's; ask with the kvtiers",
        ),
        (
            b'{"answer": [{"request": "a", "state": "ended", "prompt_tokens": 1, "attempts": [5], '
            b'"holds": 1}]}',
            "engine a: its answer is another version's",
        ),
    ],
)
def test_an_answer_that_is_none_is_told_so(
    kvtiers: Run, answering: Callable[[str, bytes], None], tmp_path: Path, said: bytes, why: str
) -> None:
    answering("a.sock", said)
    status, out, err = kvtiers("explain", "--last", 1, "--folder", tmp_path)
    assert (status, out) == (1, "")
    assert why in err and err.count("\n") == 1


def test_an_engine_that_does_not_answer_beside_one_that_does_is_told(
    kvtiers: Run, answering: Callable[[str, bytes], None], tmp_path: Path
) -> None:
    """Its request may be the one that is asked for: to say that nobody knows it was wrong."""
    answering("a.sock", b'{"answer": []}')
    answering("b.sock", b"nonsense\n")
    (tmp_path / "c.sock").touch()
    status, out, err = kvtiers("explain", "request-7", "--folder", tmp_path)
    assert (status, out) == (1, "")
    assert err.splitlines()[0].startswith(f"{tmp_path}/b.sock: Expecting value")
    assert "no engine knows such a request" in err and "c.sock" not in err


def test_several_engines_are_told_apart_in_json_alone(
    kvtiers: Run, answering: Callable[[str, bytes], None], tmp_path: Path
) -> None:
    for name in "ab":
        answering(f"{name}.sock", b'{"answer": [{"request": "r"}]}')
    status, out, _ = kvtiers("explain", "r", "--json", "--folder", tmp_path)
    assert status == 0
    assert [json.loads(line)["engine"] for line in out.splitlines()] == ["a", "b"]


def test_it_wants_one_question(kvtiers: Run, tmp_path: Path) -> None:
    for question in ([], ["r", "--last", "1"], ["--last", "1", "--slowest", "1"]):
        status, _, err = kvtiers("explain", *question, "--folder", str(tmp_path))
        assert (status, err) == (2, "give one of: a request, --last N, --slowest N\n")


def test_a_clients_name_of_a_request_moves_no_cursor(
    kvtiers: Run, engine: Callable[..., ReplayEngine], tmp_path: Path
) -> None:
    folder = tmp_path / "control"
    made = engine(cpu(), explain={})
    request = made.add([*range(9)], 1)
    del made.scheduler.requests[request.request_id]
    assert made.connector is not None
    made.connector.request_finished_all_groups(request, ())
    request.request_id = "\x1b[2Jgone\n"
    made.scheduler._waiting.clear()
    made.scheduler.add(request)
    made.run()
    _, out, _ = kvtiers("explain", "--last", "1", "--folder", str(folder))
    assert "\x1b" not in out
    assert "\\x1b[2Jgone\\n" in out
