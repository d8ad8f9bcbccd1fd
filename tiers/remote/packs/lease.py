"""A lease: of all processes on a place one does its upkeep, without locks and common clocks.

Its holder has the newest *term*, a small file or object, `upkeep/term-N`. The note in it names the
holder, and what it has counted.

- **Taken** by making the next term, which one process alone can do (`Terms.take`).
- **Kept** by writing into it: the number of beats rises.
- **Lost** when others have *watched* it for `WATCH_BEATS` of their own clock and it did not change:
  then one of them takes the next term. So hosts' clocks are never compared. A holder that was only
  stopped finds a newer term than its own at its next beat, and holds nothing any more.

Two processes may both believe to hold it for a beat, or as long as a host caches a listing (a
minute on NFS). Both then evict what is oldest: somewhat more than is needed, and nothing wrong.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

WATCH_BEATS = 6
FOLDER = "upkeep"
NOTE_BYTES = 96
_TERM = re.compile(r"term-(\d{1,12})")
_NOTE = re.compile(rb"(\w+) (\d{1,20}) (\d{1,20}) (\d{1,20}) (\d{1,20}) (\d) ")
_NOBODY = b"nobody"


class Count(NamedTuple):
    """What the holder says: it has counted `round` times, and then there were `used` bytes; it
    evicts what is beyond `capacity`, 0: nothing; `is_hindered`: 1, where it can't list or delete
    all."""

    round: int = 0
    used: int = 0
    capacity: int = 0
    is_hindered: int = 0


class Terms(Protocol):
    """Where the terms of a lease lie, each with a note of `NOTE_BYTES`. Any method may raise
    TierError or OSError."""

    def newest(self) -> int:
        """The highest term, 0 for none; what is left of older ones is removed."""

    def take(self, term: int, note: bytes) -> bool:
        """Make the term after `term`, unless another process has; whether this one did."""

    def read(self, term: int) -> bytes:
        """Its note, and what else tells one beat from another; empty: it is gone."""

    def write(self, term: int, note: bytes) -> bool:
        """Replace its note. False: it is gone; where that can't be seen, `newest` tells."""


class Lease:
    """This process's view of a place's lease. For one thread."""

    def __init__(
        self, terms: Terms, beat: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`beat`: seconds between two calls of that."""
        self._terms, self._watch, self._clock = terms, WATCH_BEATS * beat, clock
        self._owner = secrets.token_hex(8).encode()
        self._term = self._beats = 0
        self._seen: tuple[int, bytes] = (0, b"")
        self._since = clock()
        self.count = Count()
        """The last count that any holder has written; as the holder's, its next beat writes it."""

    @property
    def is_held(self) -> bool:
        """Whether this process held it at its last beat."""
        return self._term > 0

    def beat(self, count: Count | None = None) -> bool:
        """Renew it, watch it, or take it where its holder is gone; whether this process holds it.
        `count`: the last one from now on. Raises TierError, OSError: then it does not."""
        self.count = count or self.count
        held, self._term = self._term, 0
        # Others' terms are listed only where the one that is known has ended: a read costs less.
        if held or self._is_free(self._look(self._seen[0])):
            newest = self._terms.newest()
            if newest == held > 0 and self._is_ours(held):
                if self._terms.write(held, self._note()):
                    self._term = held
            elif self._is_free(self._look(newest)) and self._terms.take(newest, self._note()):
                self._term = newest + 1
        return self.is_held

    def resign(self) -> None:
        """Let others take it at once, if it is held. Raises TierError, OSError."""
        held, self._term = self._term, 0
        if held and self._terms.newest() == held and self._is_ours(held):
            self._terms.write(held, self._note(_NOBODY))

    def last_count(self) -> Count:
        """What the holder has counted, for a process without upkeep. Raises TierError, OSError."""
        self._look(self._terms.newest())
        return self.count

    def _is_ours(self, term: int) -> bool:
        """Whether it is the term that this process has made: where somebody deletes that, another
        process may make one of the same number."""
        return self._terms.read(term).startswith(self._owner + b" ")

    def _look(self, term: int) -> bytes:
        """Watch this term, and take over its count; whose it is, or empty: it is gone."""
        note = self._terms.read(term) if term else b""
        if found := _NOTE.match(note):
            self.count = Count(*map(int, found.groups()[2:]))
        if (term, note) != self._seen:
            self._seen, self._since = (term, note), self._clock()
        return found[1] if found else note

    def _is_free(self, owner: bytes) -> bool:
        """Whether nobody holds the term that was looked at last, as far as it was watched."""
        is_left = owner in (b"", _NOBODY, self._owner)  # its own: a beat that failed was the last
        return is_left or self._clock() - self._since >= self._watch

    def _note(self, owner: bytes | None = None) -> bytes:
        self._beats += 1
        note = b"%b %d %d %d %d %d " % (owner or self._owner, self._beats, *self.count)
        return note.ljust(NOTE_BYTES - 1) + b"\n"


def name_of(term: int) -> str:
    """The name of a term's file or object, in its folder."""
    return f"{FOLDER}/term-{term}"


def terms_of(names: Iterable[str]) -> list[int]:
    """The terms of these names, rising; others are left out."""
    return sorted(int(found[1]) for found in map(_TERM.fullmatch, names) if found)
