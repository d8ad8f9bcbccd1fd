"""Rows of benchmarks, made up."""

from __future__ import annotations

from bench.report import Row


def row(case: str, **more: object) -> Row:
    known = {
        "suite": "disk", "case": case, "unit": "GB/s", "ours": 2.0, "limit": 4.0, "peer": None,
        "peer_name": "", "of_limit": 0.5, "of_peer": None, "spread": 0.1, "target": 0.9,
        "of": "limit", "met": False, "why": "it is slow",
    }  # fmt: skip
    return Row(**{**known, **more})  # type: ignore[arg-type]
