"""The fault matrix, from the tests that inject the faults: python tests/fault_matrix.py

Each such test says, in its marker `fault`, the tier, the fault and what happens.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "faults.md"
TIERS = ("any", "cpu", "disk", "redis", "chain")
HEAD = """\
# Faults

What happens when something below the engine breaks, and the test that breaks it. In every row the
engine's answers stay those of an engine without a cache; what is said is what else to expect.
`any` is every store, a plugin's too; `chain` is all tiers together.

Made by `python tests/fault_matrix.py` from the tests, which `make test` and `make faults` run.
How long anything waits: [decision 16](decisions/0016-every-wait-is-bounded.md).

What none of this covers:

- Under vLLM's own `OffloadingConnector` a bit that flips in host memory between the copy off the
  device and the store is stored under a right checksum. Use memory that corrects errors.
- The first sentinel to answer is believed. One that was cut off names an old master; what is stored
  there is lost with it, and found again by nobody.
- Which KV a draft model (EAGLE, MTP) has for a block's last position depends on the next token.
  Loaded blocks may so cost it some acceptance, never a wrong token.

| tier | fault | what happens | test |
|---|---|---|---|
"""


class Row(NamedTuple):
    """A fault, and the test that injects it."""

    tier: str
    fault: str
    outcome: str
    test: str


def rows() -> list[Row]:
    """All rows, by tier, file and place in it."""
    found = [row for file in sorted(TESTS.rglob("test_*.py")) for row in _rows_of(file)]
    return sorted(found, key=lambda row: TIERS.index(row.tier))


def _rows_of(file: Path) -> Iterator[Row]:
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.FunctionDef):
            continue
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                said = {one.arg: ast.literal_eval(one.value) for one in mark.keywords}
                name = f"{file.relative_to(TESTS)}::{node.name}"
                yield Row(said["tier"], said["fault"], said["outcome"], name)


def page() -> str:
    """The page as it should be."""
    lines = [f"| {r.tier} | {r.fault} | {r.outcome} | `{r.test}` |\n" for r in rows()]
    return HEAD + "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
