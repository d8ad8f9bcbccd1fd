"""No file, class or function of the package is so long that nobody reads it whole.

These are ceilings. Most files stay under 300 lines and most functions under 30, where that costs
no mixin, no bag and no function of one use.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE_LINES, CLASS_LINES, CLASS_METHODS, FUNCTION_LINES = 400, 330, 30, 50


def too_long(path: str, text: str) -> Iterator[str]:
    """The file, its classes and its functions that are over their limits, as `path::name`."""
    if text.count("\n") > FILE_LINES:
        yield path
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = (node.end_lineno or 0) - node.lineno + 1
        is_class = isinstance(node, ast.ClassDef)
        methods = sum(isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) for n in node.body)
        limit = CLASS_LINES if is_class else FUNCTION_LINES
        if lines > limit or (is_class and methods > CLASS_METHODS):
            yield f"{path}::{node.name}"


def test_nothing_is_too_long() -> None:
    found = [
        name
        for folder in ("tiers", "spec")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in too_long(str(path.relative_to(ROOT)), path.read_text())
    ]
    assert found == [], "split it"


def test_the_rule_itself() -> None:
    long = "def f() -> None:\n" + "    pass\n" * FUNCTION_LINES
    assert list(too_long("a.py", long)) == ["a.py::f"]
    wide = "class C:\n" + "    def m(self): ...\n" * (CLASS_METHODS + 1)
    assert list(too_long("a.py", wide)) == ["a.py::C"]
    assert list(too_long("a.py", "\n" * (FILE_LINES + 1))) == ["a.py"]
    assert list(too_long("a.py", "\n" * FILE_LINES)) == []
