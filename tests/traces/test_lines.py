"""Whatever a file holds, the error names file and line, and what would do."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from tiers.errors import TraceError
from tiers.traces import lines
from tiers.traces.open_trace import open_trace

GOOD = {"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}


def line(**changes: object) -> bytes:
    return json.dumps(GOOD | changes).encode()


BAD = {
    "NaN": (b'{"timestamp": NaN, "hash_ids": []}', "NaN is no number of JSON"),
    "infinite": (line().replace(b": 0", b": 1e999", 1), "timestamp must be a number"),
    "no time of a clock": (line(timestamp=2**54), "timestamp must be a number from 0 to 2**53"),
    "bool": (line(input_length=True), "input_length must be a whole number"),
    "negative": (line(output_length=-1), "output_length must be a whole number"),
    "half": (line(input_length=7.5), "input_length must be a whole number"),
    "huge number": (line(input_length=2**31), "input_length must be a whole number"),
    "more digits than fit": (b'{"hash_ids": [' + b"9" * 5000 + b"]}", "it is no JSON object"),
    "bool id": (line(hash_ids=[0, True]), "hash_ids must be whole numbers, not True"),
    "text id": (line(hash_ids=["a"]), "hash_ids must be whole numbers, not 'a'"),
    "negative id": (line(hash_ids=[-1]), "hash_ids must be from 0 to"),
    "id of 65 bits": (line(hash_ids=[2**64]), "hash_ids must be from 0 to"),
    "ids are no list": (line(hash_ids={"0": 1}), "hash_ids must be a list"),
    "same id twice": (line(hash_ids=[3, 4, 3]), "hash_ids has 3 twice"),
    "more ids than blocks": (line(input_length=1024), "3 hash_ids are more than the blocks of"),
    "no ids": (b'{"input_length": 5}', "it has no hash_ids; its keys are: 'input_length'"),
    "no object": (b"[1, 2]", "it is no JSON object but"),
    "nested": (b'{"a":' + b"[" * 200_000, "nested too deep"),
    "no text": (b"\xff\xfe", "it is no JSON object"),
}


@pytest.mark.parametrize(("bad", "why"), BAD.values(), ids=BAD)
def test_a_bad_line_is_named(tmp_path: Path, bad: bytes, why: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([line(), bad, line(), b""]))
    with pytest.raises(TraceError) as raised:
        list(open_trace(path))
    assert str(raised.value).startswith(f"{path}:2: ")
    assert why in str(raised.value)
    assert len(str(raised.value)) < 400 + len(str(path))


def test_an_endless_line_is_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE", 2**20)
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(line() + b"\n")
        file.truncate(2**40)  # a hole: it takes no space
    with pytest.raises(TraceError, match=r"a.jsonl:2: the line is longer than 1 MiB"):
        list(open_trace(path))


def test_times_going_backwards_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(line(timestamp=time) for time in (50, 70, 60, 80)))
    trace = open_trace(path)
    assert [request.timestamp for request in trace] == [0, 20, 20, 30]
    assert trace.summary.skipped.total() == 1


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (b'{"a": 1}\n', "a.jsonl:1: its keys are those of no known format"),
        (b"\x28\xb5\x2f\xfd", "a.jsonl: it is cut off after byte 4"),
        (
            gzip.compress(line(), mtime=0),
            "a.jsonl: it is compressed with gzip; unpack it with gunzip",
        ),
        (b'{"format": "kvtiers-trace", "version": 2}\n', "its version is 2, and this release"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=why):
        open_trace(path)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="too long"):  # it is not known to be missing
        open_trace(Path(tmp_path, "x" * 256))
    with pytest.raises(TraceError, match="there is no such file"):
        open_trace(tmp_path / "a")
    with pytest.raises(TraceError, match="has no file"):
        open_trace(tmp_path)


def test_what_cannot_be_read_twice_is_refused(tmp_path: Path) -> None:
    """A pipe had nothing to give the second time, or kept the command waiting for ever."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(TraceError, match=f"{path}: it is no file; a trace is read twice"):
            open_trace(path)
