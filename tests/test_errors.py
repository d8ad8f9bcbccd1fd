"""Every error class of ours is in the tree of `KVTiersError`."""

from __future__ import annotations

import ast
import builtins
from pathlib import Path

from tiers.errors import TierNotOpen, TierUnusable

ROOT = Path(__file__).parent.parent
ERRORS = {
    name
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException)
}


def classes() -> dict[str, list[str]]:
    """The classes of `spec` and `tiers`, and the names of their bases."""
    return {
        node.name: [ast.unparse(base).rpartition(".")[2] for base in node.bases]
        for part in ("spec", "tiers")
        for path in (ROOT / part).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }


def test_every_error_of_ours_is_in_one_tree() -> None:
    bases = classes()

    def ancestors(name: str) -> set[str]:
        return {name}.union(*(ancestors(base) for base in bases.get(name, [])))

    ours = {name for name in bases if ancestors(name) & ERRORS}
    assert {"SpecError", "StreamError", "BrokenPlugin"} <= ours
    assert {name for name in ours if "KVTiersError" not in ancestors(name)} == set()


def test_a_tier_that_may_open_later_is_not_unusable() -> None:
    assert not issubclass(TierNotOpen, TierUnusable)
