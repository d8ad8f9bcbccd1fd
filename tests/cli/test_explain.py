"""`kvtiers explain` of an engine in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.support.replay_chains import MODEL, chain_of, close, cpu, disk
from tiers.engine.replay import ReplayEngine

Run = Callable[..., tuple[int, str, str]]


def test_it_tells_of_requests_by_name_the_last_and_the_slowest(
    kvtiers: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "explain"
    chain = chain_of(cpu(4), disk(tmp_path), explain={"folder": str(folder)})
    made = ReplayEngine(chain, MODEL, prefix_caching=False)
    for _ in range(2):
        made.generate([*range(42)], 2)
        made.settle()
    status, out, err = kvtiers("explain", "request-1", "--folder", str(folder))
    assert (status, err) == (0, "")
    assert out.splitlines()[:2] == [
        "request request-1: finished, 42 prompt tokens",
        "  42 tokens = 0 own cache + 16 cpu + 24 disk + 2 computed",
    ]
    status, out, _ = kvtiers("explain", "--last", "2", "--json", "--folder", str(folder))
    assert [json.loads(line)["request"] for line in out.splitlines()] == ["request-0", "request-1"]
    status, out, _ = kvtiers("explain", "--slowest", "1", "--folder", str(folder))
    assert (status, out.split()[1]) == (0, "request-1:")
    assert kvtiers("explain", "nobody", "--folder", str(folder))[0] == 1
    close(made)
    status, _, err = kvtiers("explain", "--last", "1", "--folder", str(folder))
    assert status == 1
    assert "no engine listens" in err


def test_it_wants_one_question(kvtiers: Run, tmp_path: Path) -> None:
    for question in ([], ["r", "--last", "1"], ["--last", "1", "--slowest", "1"]):
        status, _, err = kvtiers("explain", *question, "--folder", str(tmp_path))
        assert (status, err) == (2, "give one of: a request, --last N, --slowest N\n")


def test_a_clients_name_of_a_request_moves_no_cursor(kvtiers: Run, tmp_path: Path) -> None:
    folder = tmp_path / "explain"
    chain = chain_of(cpu(), explain={"folder": str(folder)})
    made = ReplayEngine(chain, MODEL)
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
    close(made)
