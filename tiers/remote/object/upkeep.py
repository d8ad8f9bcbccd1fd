"""What the upkeep of a bucket of an object store has of its own: its lease's objects, and its pace.

PREFIX/upkeep/term-N lies beside the packs. A term is made by a conditional put, which every store
has that packs may lie in, and a beat replaces it by a plain one. A put on the condition of an
`e_tag` would do the same in one object: S3 and SeaweedFS have it, folders of files have not, and
GCS wants a version in its place.
"""

from __future__ import annotations

from contextlib import suppress

from tiers.errors import TierError, TierFull
from tiers.remote.object.obstore_bucket import ObstoreBucket
from tiers.remote.packs.evictor import Pace, Pause
from tiers.remote.packs.lease import FOLDER, NOTE_BYTES, name_of, terms_of

PACE = Pace(beat=30.0, usual=Pause(60.0, 4.0), full=Pause(10.0, 1.0), deletes=1000)
"""A listing is a request for 1,000 objects, and so is a delete: a fifth of the time at most is
spent on them."""


class ObjectTerms:
    """The `Terms` of a bucket."""

    def __init__(self, bucket: ObstoreBucket) -> None:
        self._bucket = bucket

    def newest(self) -> int:
        terms = terms_of(self._bucket.names(FOLDER))
        with suppress(TierError, OSError):  # who may not delete finds that out by its packs
            self._bucket.delete([name_of(term) for term in terms[:-1]])
        return terms[-1] if terms else 0

    def take(self, term: int, note: bytes) -> bool:
        return self._bucket.put(name_of(term + 1), [note])

    def read(self, term: int) -> bytes:
        note = bytearray(NOTE_BYTES)
        return bytes(note) if self._bucket.read(name_of(term), 0, [memoryview(note)]) else b""

    def write(self, term: int, note: bytes) -> bool:
        with suppress(TierFull):  # nobody else can take it either, and packs must go
            self._bucket.replace(name_of(term), note)
        return True
