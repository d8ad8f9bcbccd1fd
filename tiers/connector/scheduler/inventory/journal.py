"""Journal: files of what one engine has announced of a tier's blocks.

FOLDER/<namespace>/<engine>/     0700, everything in it 0600
  lock                           locked while that engine lives
  00000001.runs                  runs (see `runs`), in the order in which they were announced

An engine that starts takes over what dead ones left: it is announced once more, by this engine. A
file that is cut off by a crash loses its last runs, and nothing else. Nothing is synced: what a
crash of the machine takes is not announced, and is found when a request asks for it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import struct
import time
import zlib
from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from tiers.concurrency.file_locks import opened, release
from tiers.contract.protocols import Origin
from tiers.wrappers.journals import DRAFT, SUFFIX, dead, forget_dead, lock, segments

SEGMENT_BYTES = 1 << 20
"""Bytes after which a file is closed and another begun: 10,000 blocks, checked in one go."""
MAX_BYTES = 1 << 30
"""Bytes of one engine's files beyond which nothing is added: ten million blocks."""
FORGOTTEN_SECONDS = 30 * 86_400.0
"""After so long journals of other namespaces, as of weights of before, are removed."""
_NAMESPACE = re.compile(r"(.+\.)?[0-9a-f]{32}")


class Journal:
    """The files of one engine; used by one thread. Any method may raise OSError."""

    def __init__(self, folder: Path) -> None:
        """`folder`: that of the namespace; made if it is missing."""
        self._all = folder
        for part in (folder.parent, folder):
            part.mkdir(mode=0o700, exist_ok=True)
        self._mine, self._lock = _new(folder)
        self._number = 0
        self._open: int | None = None
        self._open_bytes = self._bytes = 0

    def append(self, run: Run) -> bool:
        """Add a run; False: there is no room, or it can't be packed."""
        try:
            packed = pack(run)
        except (ValueError, TypeError, OverflowError):
            return False
        if self._bytes + len(packed) > MAX_BYTES:
            return False
        if self._open is None or self._open_bytes + len(packed) > SEGMENT_BYTES:
            self.rotate()
            self._number += 1
            self._open = _create(self._mine / f"{self._number:08}{SUFFIX}")
        _write(self._open, packed)
        self._open_bytes += len(packed)
        self._bytes += len(packed)
        return True

    def rotate(self) -> None:
        if self._open is not None:
            os.close(self._open)
        self._open, self._open_bytes = None, 0

    def closed(self) -> list[Path]:
        """The files that are not written any more, oldest first."""
        files = segments(self._mine)
        return files[:-1] if self._open is not None else files

    def dead(self) -> Iterator[Path]:
        """The files that dead engines left, to take over."""
        return dead(self._all, self._mine)

    def forget_others(self) -> None:
        """Remove what dead engines of other namespaces left long ago. What is no journal stays: the
        folder may be one that the operator has for more."""
        since = time.time() - FORGOTTEN_SECONDS
        for other in self._all.parent.iterdir():
            if other == self._all or not _NAMESPACE.fullmatch(other.name):
                continue
            if all(path.stat().st_mtime < since for path in (other, *other.rglob("*"))):
                forget_dead(other)

    def rewrite(self, file: Path, runs: list[Run]) -> None:
        """Keep these runs of a closed file alone."""
        before = file.stat().st_size
        if not runs:
            file.unlink()
            self._bytes -= before
            return
        draft = file.with_suffix(DRAFT)
        with os.fdopen(_create(draft), "wb") as made:
            made.writelines(map(pack, runs))
        draft.rename(file)
        self._bytes += file.stat().st_size - before

    def merge(self, before: Path | None, file: Path) -> Path:
        """Move what a closed file has to the end of the one `before` it, where both are no more
        than one file's worth; return where it is. An engine that stores little closes a file with a
        few blocks every few seconds, and keeps them for days."""
        if before is None or before.stat().st_size + file.stat().st_size > SEGMENT_BYTES:
            return file
        with opened(before, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW) as end:
            _write(end, file.read_bytes())
        file.unlink()
        return before

    def close(self) -> None:
        self.rotate()
        release(self._lock)


def read(file: Path) -> list[Run]:
    """The runs of a file, as far as it is whole."""
    with file.open("rb") as runs:
        return list(unpack(runs.read(SEGMENT_BYTES + MAX_RUN_BYTES)))


def _create(file: Path) -> int:
    return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _new(folder: Path) -> tuple[Path, int]:
    """A new folder of an engine, and its lock."""
    while True:
        mine = folder / secrets.token_hex(8)
        mine.mkdir(mode=0o700)
        # Who looks for what the dead left at this moment may be first, and then removes it.
        if (held := lock(mine, os.O_CREAT)) is not None:
            return mine, held


_FRAME = struct.Struct("<II")
_HEAD = struct.Struct("<HHII")
MAX_RUN_BYTES = 64 << 20
"""A longer frame is damage: a run is what one step stored."""


class Run(NamedTuple):
    """Blocks of one KV cache group that follow each other in a prompt; see `BlockEvent`.

    `keys`: those that tiers have, whose first `hash_bytes` are the engine's hash.
    """

    keys: Sequence[bytes]
    hash_bytes: int
    group: int
    block_tokens: int
    parent: bytes | None
    origin: Origin

    @property
    def hashes(self) -> tuple[bytes, ...]:
        return tuple(key[: self.hash_bytes] for key in self.keys)

    def held(self, held: Sequence[bool]) -> Iterator[Run]:
        for is_held, run in groupby(range(len(held)), held.__getitem__):
            if is_held:
                places = [*run]
                yield self.part(places[0], places[-1] + 1)

    def part(self, begin: int, end: int) -> Run:
        if end - begin == len(self.keys):
            return self
        origin, size = self.origin, self.block_tokens
        return self._replace(
            keys=self.keys[begin:end],
            parent=self.keys[begin - 1][: self.hash_bytes] if begin else self.parent,
            origin=origin._replace(
                tokens=origin.tokens[begin * size : end * size],
                extra_keys=origin.extra_keys and origin.extra_keys[begin:end],
            ),
        )


def pack(run: Run) -> bytes:
    """A run as bytes, with their length and checksum. Raises ValueError and TypeError for what
    can't be kept: keys of several lengths, or what an engine adds that JSON has no form for."""
    sizes = {len(key) for key in run.keys}
    if len(sizes) != 1:
        raise ValueError("keys of several lengths")
    origin = run.origin
    facts = [
        run.group,
        run.block_tokens,
        (run.parent or b"").hex(),
        origin.lora_id,
        origin.lora_name,
        origin.extra_keys,
    ]
    head = json.dumps(facts).encode()
    lengths = _HEAD.pack(sizes.pop(), run.hash_bytes, len(run.keys), len(head))
    body = b"".join([lengths, head, *run.keys, array("I", origin.tokens).tobytes()])
    return _FRAME.pack(len(body), zlib.crc32(body)) + body


def unpack(data: bytes) -> Iterator[Run]:
    """The runs in a file, up to the first that is damaged, such as one cut off by a crash."""
    at = 0
    while len(data) - at >= _FRAME.size:
        size, checksum = _FRAME.unpack_from(data, at)
        body = data[at + _FRAME.size : at + _FRAME.size + size]
        if size > MAX_RUN_BYTES or len(body) < size or zlib.crc32(body) != checksum:
            return
        try:
            yield _run(body)
        except (ValueError, TypeError, RecursionError, struct.error):  # as of another version
            return
        at += _FRAME.size + size


def _run(body: bytes) -> Run:
    key_bytes, hash_bytes, count, head_bytes = _HEAD.unpack_from(body)
    start = _HEAD.size
    facts: list[Any] = json.loads(body[start : start + head_bytes])
    group, block_tokens, parent, lora_id, lora_name, extra_keys = facts
    start += head_bytes
    end = start + count * key_bytes
    if end > len(body):
        raise ValueError("it says that it has more keys")
    keys = [body[i : i + key_bytes] for i in range(start, end, key_bytes)]
    tokens = array("I", body[end:])
    origin = Origin(tokens.tolist(), lora_id, lora_name, _tuples(extra_keys))
    return Run(keys, hash_bytes, group, block_tokens, bytes.fromhex(parent) or None, origin)


def _tuples(keys: Any) -> Any:
    """An engine's extra keys as it had them: a list of tuples, which JSON has no form for."""
    if keys is None:
        return None
    return [
        None if one is None else tuple(tuple(k) if type(k) is list else k for k in one)
        for one in keys
    ]
