"""The format that is recorded: written and read back, compressed, cut off, rotated, merged."""

from __future__ import annotations

import tracemalloc
from array import array
from pathlib import Path

import pytest
import zstandard

from tiers.errors import TraceError
from tiers.traces.open_trace import open_trace
from tiers.traces.recorded import FileHeader, encode_header, encode_request
from tiers.traces.trace import TOGETHER, TraceRequest

HEADER = FileHeader(block_tokens=16, started=1000.0, kv_bytes_per_token=2048)
REQUESTS = [
    TraceRequest(0.0, 40, 7, array("Q", [2**64 - 1, 0])),
    TraceRequest(2.5, 15, 0, array("Q"), "salt"),
    TraceRequest(1e9, 33, 1, array("Q", [2**64 - 1, 5])),
]


def written(*requests: TraceRequest, header: FileHeader = HEADER) -> bytes:
    return encode_header(header) + b"".join(map(encode_request, requests))


def test_what_is_written_is_read_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(written(*REQUESTS))
    trace = open_trace(path)
    assert (trace.header.block_tokens, trace.header.kv_bytes_per_token) == (16, 2048)
    assert list(trace) == list(trace) == REQUESTS
    assert not trace.summary.skipped
    assert trace.summary.bytes_read == trace.file_bytes


def test_who_keeps_a_trace_keeps_8_bytes_of_an_id(tmp_path: Path) -> None:
    # Lists of ints take 40: a search in a recording of a gigabyte would need tens of them.
    path, count = tmp_path / "a.jsonl", 100_000
    path.write_bytes(written(TraceRequest(0.0, count * 16, 0, range(2**60, 2**60 + count))))
    tracemalloc.start()
    kept = list(open_trace(path))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(kept[0].blocks) == count and used < 10 * count


def frames(text: bytes, size: int) -> bytes:
    parts = (text[at : at + size] for at in range(0, len(text), size))
    return b"".join(map(zstandard.ZstdCompressor().compress, parts))


def test_zstd_of_many_frames(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(frames(written(*REQUESTS), 20))
    trace = open_trace(path)
    assert list(trace) == REQUESTS
    assert trace.summary.bytes_read == trace.file_bytes


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.zst"])
def test_a_file_cut_off_anywhere_is_read_up_to_there(tmp_path: Path, suffix: str) -> None:
    whole = written(*REQUESTS)
    data = frames(whole, 50) if suffix.endswith("zst") else whole
    path = tmp_path / f"a.{suffix}"
    read = set()
    for length in range(170, len(data)):  # behind the first line and the first frame
        path.write_bytes(data[:length])
        trace = open_trace(path)
        found = list(trace)
        assert found == REQUESTS[: len(found)]
        read.add(len(found))
    assert read >= {0, 1, 2}


COUNT = 4000
"""Requests of more than one of zstd's blocks of 128 KiB."""


@pytest.mark.parametrize("level", [-5, 1, 19])
@pytest.mark.parametrize("has_sum", [True, False])
def test_a_cut_off_frame_is_said(tmp_path: Path, level: int, has_sum: bool) -> None:
    """Its requests are gone, and what precedes it ends with a whole line."""
    compress = zstandard.ZstdCompressor(level=level, write_checksum=has_sum).compress
    many = [TraceRequest(0.0, 16, 0, [7]) for _ in range(COUNT)]
    blank = b" " * 2**19 + b"\n"  # blocks of one byte repeated
    lines = [encode_header(HEADER), b"".join(map(encode_request, many)), blank]
    lines.append(encode_request(many[0]))
    skipped = b"\x5a\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
    parts = [skipped, *map(compress, lines)]
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"".join(parts))
    trace = open_trace(path)
    assert (len(list(trace)), trace.summary.skipped) == (COUNT + 1, {})
    for cut in (1, len(parts[-1]) // 2, len(parts[-1]) - 1):
        path.write_bytes(b"".join(parts)[:-cut])
        trace = open_trace(path)
        assert len(list(trace)) >= COUNT
        at = path.stat().st_size
        note = f"{path}: it is cut off after byte {at}; all before its last part was read"
        assert trace.summary.skipped["cut off ends of files"] == 1
        assert note in trace.summary.notes


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst"])
def test_the_content_says_how_a_file_is_packed(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    plain = written(*REQUESTS)
    for content in (plain, b"\xef\xbb\xbf" + plain, frames(plain, 90)):
        path.write_bytes(content)
        assert list(open_trace(path)) == REQUESTS


def test_a_cut_off_line_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(written(*REQUESTS)[:-9])
    trace = open_trace(path)
    assert list(trace) == REQUESTS[:2]
    assert trace.summary.skipped == {"last lines that were cut off": 1}
    assert trace.summary.notes == [f"{path}:4: cut off"]


def test_zeros_behind_the_last_frame_are_said(tmp_path: Path) -> None:
    # What some file systems leave after a power failure.
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(frames(written(*REQUESTS), 10**6) + bytes(5000))
    trace = open_trace(path)
    assert list(trace) == REQUESTS
    assert trace.summary.skipped == {"damaged ends of files": 1}


def test_a_folder_of_rotated_files_is_read_in_order(tmp_path: Path) -> None:
    for name, started, ids in (("b", 5000.0, 1), ("a", 9000.0, 2), ("c", 7000.0, 3)):
        request = TraceRequest(100.0, 16, 1, [ids])
        header = HEADER._replace(started=started)
        (tmp_path / f"{name}.jsonl").write_bytes(written(request, header=header))
    (tmp_path / "new.jsonl.zst").write_bytes(b"")
    trace = open_trace(tmp_path)
    assert [(r.timestamp, *r.blocks) for r in trace] == [(0, 1), (2000, 3), (4000, 2)]
    assert trace.summary.skipped == {"files without a whole first line": 1}


def test_writers_are_merged_by_time(tmp_path: Path) -> None:
    for writer in range(2):
        requests = [TraceRequest(float(t), 16, 1, [t]) for t in range(writer, 10, 2)]
        header = HEADER._replace(writer=str(writer))
        (tmp_path / f"{writer}.jsonl").write_bytes(written(*requests, header=header))
    assert [[*r.blocks] for r in open_trace(tmp_path)] == [[t] for t in range(10)]


@pytest.mark.parametrize(
    ("spans", "engines"),
    [
        ([(0, 90), (100, 190)], 1),
        ([(0, 100), (95, 190)], 1),
        ([(0, 100), (70, 190)], 2),
        ([(0, 100), (0, 100), (5, 90), (91, 100)], 3),
        ([(0, 100), (50, 50), ()], 1),
    ],
)
def test_how_many_engines_recorded_at_the_same_time_is_known(
    tmp_path: Path, spans: list[tuple[int, ...]], engines: int
) -> None:
    """But for some time in which one takes over from another."""
    for writer, span in enumerate(spans):
        requests = [TraceRequest(float(at), 16, 1, [writer]) for at in span]
        header = HEADER._replace(writer=str(writer))
        (tmp_path / f"{writer}.jsonl").write_bytes(written(*requests, header=header))
    trace = open_trace(tmp_path)
    assert len(list(trace)) == sum(map(len, spans))
    assert trace.summary.skipped == ({} if engines == 1 else {TOGETHER: engines})


def test_files_of_two_traces_are_refused(tmp_path: Path) -> None:
    for tokens in (16, 32):
        header = HEADER._replace(block_tokens=tokens)
        (tmp_path / f"{tokens}.jsonl").write_bytes(written(header=header))
    with pytest.raises(TraceError, match=r"32.jsonl:1: block_tokens is 32, but 16 in .*16.jsonl"):
        open_trace(tmp_path)


def test_a_file_that_rotation_deletes_meanwhile_is_said(tmp_path: Path) -> None:
    for name, started in (("a", 1000.0), ("b", 2000.0)):
        header = HEADER._replace(started=started)
        (tmp_path / f"{name}.jsonl").write_bytes(written(REQUESTS[0], header=header))
    trace = open_trace(tmp_path)
    (tmp_path / "a.jsonl").unlink()
    assert trace.file_bytes > 0
    assert [request.blocks for request in trace] == [REQUESTS[0].blocks]
    assert trace.summary.skipped == {"files that were deleted meanwhile": 1}
