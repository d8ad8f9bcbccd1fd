"""The faults that tests inject, by what an operator sees: `python -m tests.fault_matrix`

writes docs/faults.md from `faults.toml` beside this file, whose rows name the tests that break what
they say. Each such test has the marker `fault`.
"""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
TABLE = TESTS / "faults.toml"
PAGE = TESTS.parent / "docs" / "faults.md"
HEAD = """\
# Faults

When something below the engine breaks, answers stay those of an engine without a cache: blocks that
can't be loaded are computed. This page says what else to expect, by what you see;
`tests/faults.toml` names the tests that break each thing.

Not covered:

- Under vLLM's own `OffloadingConnector` a bit that flips in host memory before the store gets a
  right checksum. Use memory that corrects errors.
- The first sentinel to answer is believed. One that was cut off names an old master.
- A load may change which drafts are accepted: answers, too, under `synthetic` and `fly`.
"""


class Row(NamedTuple):
    """What breaks, what happens then, and the functions of the tests that break it."""

    fault: str
    outcome: str
    tests: Sequence[str]


def symptoms() -> dict[str, list[Row]]:
    """The rows of the page, by the symptom."""
    table = tomllib.loads(TABLE.read_text())
    return {one["title"]: [Row(*row) for row in one["rows"]] for one in table["symptom"]}


def marked() -> Iterator[str]:
    """The functions of all tests that inject a fault."""
    for file in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and any(map(_is_fault, node.decorator_list)):
                yield node.name


def _is_fault(mark: ast.expr) -> bool:
    return ast.unparse(mark.func if isinstance(mark, ast.Call) else mark) == "pytest.mark.fault"


def problems(rows: Sequence[Row], tests: Sequence[str]) -> list[str]:
    """What keeps the rows from being those of the tests: each test in one row, none else."""
    named = Counter(test for row in rows for test in row.tests)
    return [
        *(f"{row.fault}: no test" for row in rows if not row.tests),
        *(f"{test}: in no row of {TABLE.name}" for test in tests if test not in named),
        *(f"{test}: in several rows" for test, count in named.items() if count > 1),
        *(f"{test}: no test with the marker fault" for test in named if test not in tests),
        *(f"{test}: several tests" for test, count in Counter(tests).items() if count > 1),
    ]


def page() -> str:
    """The page as it should be."""
    parts = [HEAD]
    for title, rows in symptoms().items():
        lines = [f"- **{row.fault}.** {row.outcome}\n" for row in rows]
        parts.append(f"\n## {title}\n\n{''.join(lines)}")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
