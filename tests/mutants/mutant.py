"""A mutant: a source file of ours with a defect."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    """`edits`: texts of the file that occur once, each with what takes its place. `kind`: what
    the defect is about. `equal`: why no test can tell it from the store; empty: one can.
    `survives`: why the kit does not, although it is a defect."""

    store: str
    kind: str
    what: str
    file: str
    edits: tuple[tuple[str, str], ...]
    equal: str = ""
    survives: str = ""

    @property
    def module(self) -> str:
        return self.file.removesuffix(".py").replace("/", ".")

    def source(self) -> str:
        """The mutant's source. Raises ValueError if the file has changed since it was written."""
        text = (ROOT / self.file).read_text()
        for old, new in self.edits:
            if text.count(old) != 1:
                times = text.count(old)
                raise ValueError(f"{self.what}: {self.file} has {times} times, not once: {old!r}")
            text = text.replace(old, new)
        return text


@dataclass(frozen=True)
class Source:
    """Makes mutants of one file."""

    store: str
    file: str

    def but(self, kind: str, what: str, *edits: str, equal: str = "", survives: str = "") -> Mutant:
        """The store, but with a defect: `edits` are an old text, a new one, and so on."""
        pairs = tuple(zip(edits[::2], edits[1::2], strict=True))
        return Mutant(self.store, kind, what, self.file, pairs, equal, survives)
