"""How large the house is: what `make lint` prints beside its ceilings.

    python -m tests.figures [--json]

A figure over its ceiling is marked; too many lines fail a test: make room, or raise the ceiling in
the change that is worth it, and say why. Lower a ceiling when a figure has fallen. Code is without
docstrings, comments and blank lines.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Self

from spec.chain import LOAD_POLICIES
from tests.support.replay import ReplayEngine
from tests.support.replay_chains import chain_of, cpu, disk
from tiers.connector.multi.multi_scheduler import MultiScheduler
from tiers.disk.index.fingerprint_index import FingerprintTable

ROOT = Path(__file__).parents[1]
FILE_LINES, CLASS_METHODS, FUNCTION_LINES, PAGE_WORDS = 300, 35, 30, 1500
CEILINGS = {
    "lines of tiers and spec": 53_840,
    "folder circles": 0,
    "files that a look-up runs through": 34,
    "files that a store runs through": 73,
    "files that a load runs through": 73,
    "frames from a look-up to a tier's table": 14,
}
"""By the beginning of a figure's name."""

Call = tuple[str, str]
"""A file of ours and a function in it."""


def all_figures() -> dict[str, int]:
    """Each figure by its name."""
    return {**sizes(), **circles(), **walks(), **pages()}


def sizes() -> dict[str, int]:
    """Lines by room, and how many files, classes and functions are long."""
    rooms: dict[str, int] = {}
    found = dict.fromkeys(("files", "classes", "long files", "wide classes", "long functions"), 0)
    total = 0
    for path in _modules():
        text = path.read_text()
        tree = ast.parse(text)
        parts = path.relative_to(ROOT).parts
        room = "/".join(parts[: min(2, len(parts) - 1)])
        rooms[room] = rooms.get(room, 0) + _code_lines(tree, text)
        total += text.count("\n")
        found["files"] += 1
        found["long files"] += text.count("\n") > FILE_LINES
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found["classes"] += 1
                found["wide classes"] += _methods(node) > CLASS_METHODS
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                found["long functions"] += lines > FUNCTION_LINES
    code = {f"code in {room}": count for room, count in sorted(rooms.items())}
    return {"lines of tiers and spec": total, **found, **code}


def circles() -> dict[str, int]:
    """How many files and folders are knotted."""
    return {"folder circles": len(knots())}


def knots() -> set[str]:
    """The files and folders that lie on a circle of imports, each with what lies beside it."""
    arrows = (
        (path.relative_to(ROOT).parts, _home(name).relative_to(ROOT).parts)
        for path in _modules()
        for name in _imported(ast.parse(path.read_text()))
    )
    return on_circles(beside(arrows))


def beside(arrows: Iterable[tuple[tuple[str, ...], tuple[str, ...]]]) -> dict[str, set[str]]:
    """Arrows from module to module as ones between the two files or folders that lie side by side
    where the modules' paths part. Also those of functions and for type checkers count."""
    graph: dict[str, set[str]] = {}
    for here, there in arrows:
        if here != there:
            same = next(i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b)
            graph.setdefault("/".join(here[: same + 1]), set()).add("/".join(there[: same + 1]))
    return graph


def on_circles(graph: dict[str, set[str]]) -> set[str]:
    """The nodes of a graph that lead to themselves."""
    return {one for one in graph if one in _reached(graph, one)}


def walks() -> dict[str, int]:
    """Files that one look-up, one store and one load run through, by policy of loads."""
    found: dict[str, int] = {}
    for policy in LOAD_POLICIES:
        looked, stored, loaded, route = walk(policy)
        for name, calls in (("look-up", looked), ("store", stored), ("load", loaded)):
            found[f"files that a {name} runs through, {policy}"] = len({file for file, _ in calls})
            found[f"functions of a {name}, {policy}"] = len(calls)
        found[f"frames from a look-up to a tier's table, {policy}"] = len(route)
    return found


def walk(policy: str) -> tuple[set[Call], set[Call], set[Call], list[str]]:
    """What a look-up, a request that is stored and one that is loaded from disk call; and the
    frames of the deepest look-up."""
    with TemporaryDirectory() as folder, Calls() as calls:
        chain = chain_of(cpu(4), disk(Path(folder)), load_policy=policy)
        engine = ReplayEngine(chain, prefix_caching=False)
        calls.of(engine, 1000)  # by then the tiers are open
        stored, _ = calls.of(engine, 0)
        loaded, looked = calls.of(engine, 0)
        engine.close()
    route = [f"{Path(code.co_filename).name}:{code.co_name}" for code in calls.deepest]
    return looked, stored, loaded, route


class Calls:
    """Notes which functions of ours run, on this thread and those begun since."""

    def __init__(self) -> None:
        self.deepest: list[CodeType] = []
        self._called: set[Call] = set()
        self._looked: set[Call] = set()
        self._look_up = MultiScheduler.get_num_new_matched_tokens.__code__

    def __enter__(self) -> Self:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def of(self, engine: ReplayEngine, first: int) -> tuple[set[Call], set[Call]]:
        """What serving a prompt, from this token on, calls, and of that what its look-up does."""
        self._called, self._looked = set(), set()
        engine.generate(range(first, first + 40))
        engine.settle()
        return {*self._called}, {*self._looked}  # what the engine closes by is no part of it

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not (file := _ours(frame.f_code.co_filename)):
            return
        call = file, frame.f_code.co_qualname
        self._called.add(call)
        if route := _route(frame, self._look_up):
            self._looked.add(call)
            if frame.f_code is FingerprintTable.has.__code__:
                self.deepest = max(self.deepest, route, key=len)


@cache
def _ours(name: str) -> str:
    """The path below the root of a file that a walk counts; empty: it does not."""
    file = os.path.relpath(name, ROOT)
    return file if file.startswith(("tiers/", "spec/")) and "/replay/" not in file else ""


def pages() -> dict[str, int]:
    """Words of the pages of docs that have many, and of all decisions."""
    found = {"decisions": 0, "words of decisions": 0}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        words = len(path.read_text().split())
        if path.parent.name == "decisions":
            found["decisions"] += 1
            found["words of decisions"] += words
        elif words > PAGE_WORDS:
            found[f"words of docs/{path.name}"] = words
    return found


def _route(frame: FrameType | None, start: CodeType) -> list[CodeType]:
    """What the frames from one of this code to a frame, both too, run; none: none calls it."""
    codes: list[CodeType] = []
    while frame is not None:
        codes.append(frame.f_code)
        if frame.f_code is start:
            return codes[::-1]
        frame = frame.f_back
    return []


def _modules() -> Iterator[Path]:
    for part in ("spec", "tiers"):
        yield from sorted((ROOT / part).rglob("*.py"))


def _methods(node: ast.ClassDef) -> int:
    return sum(isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) for one in node.body)


def _code_lines(tree: ast.Module, text: str) -> int:
    docs: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(number not in docs and line.strip()[:1] not in ("", "#") for number, line in lines)


def _home(name: str) -> Path:
    """The file of the module that a dotted name is, or is in."""
    path = ROOT.joinpath(*name.split("."))
    while not (path.with_suffix(".py").exists() or (path / "__init__.py").exists()):
        path = path.parent
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
            "tiers",
            "spec",
        ):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    rest = [start]
    while rest:
        new = graph.get(rest.pop(), set()) - found
        found |= new
        rest.extend(new)
    return found


def main() -> None:
    """Print the figures."""
    found = all_figures()
    if "--json" in sys.argv:
        print(json.dumps(found))
        return
    for name, value in found.items():
        ceiling = next((most for start, most in CEILINGS.items() if name.startswith(start)), None)
        over = "" if ceiling is None else f"  of {ceiling:,}{' <- over' * (value > ceiling)}"
        print(f"{value:>9,}  {name}{over}")


if __name__ == "__main__":
    main()
