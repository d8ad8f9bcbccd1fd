"""Blocks are put by a process beside the engine's, into a store that is open here as well.

Whoever puts blocks takes the interpreter's lock again after each call of the system, of LMDB or of
a checksum, and an engine's thread that launches small kernels sleeps each time until it has the
lock back. The process has an interpreter of its own (`put_server`): payloads are copied into its
memory, without the lock, and its answer is waited for. All other verbs stay here.

A process can't be had everywhere, nor may everybody write into another's memory. Then blocks are
put here, and the tier is degraded. One whose put is late is ended. What it may go on to put, as
while it waits for its device, are copies: the engine's memory has other blocks by then.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from operator import add
from typing import Any

from spec.errors import describe_error, reason_of
from spec.offloading import StoreContext, StoreSpec
from spec.registry import make_tier
from tiers import errors
from tiers.block import address_of
from tiers.concurrency.beside import PART_BYTES, Beside, CannotServe
from tiers.errors import RecordError, TierError, TierUnavailable
from tiers.store import (
    Block,
    Counts,
    PutCounts,
    Resizable,
    StoreWrapper,
    TierStore,
    Warns,
    each,
    required,
    time_left,
)

OPEN_SECONDS = 30.0
"""After so long one line says that a process has yet to open its store."""
logger = logging.getLogger(__name__)


class PutsApart(StoreWrapper):
    """A TierStore over one that is open here, whose blocks a process puts that has it open, too."""

    def __init__(self, store: TierStore, spec: StoreSpec, site: StoreContext, name: str) -> None:
        """Takes over `store`, opened by `spec`. Begins the process, and does not wait for it."""
        super().__init__(store)
        self._spec, self._site, self._name = spec, site, name
        self._mark: str = getattr(store, "key_mark", "")
        self.puts_here = ""
        """Why blocks are put here; empty: they are not, or a process has yet to open."""
        self._has_served = self._closed = False
        # Held during a put. A change of the capacity comes from another thread.
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._before: _Process | None = None
        self._begin()

    def _begin(self) -> None:
        try:
            if self._before is not None and not self._before.kill():  # its device may hang
                raise CannotServe(f"the process {self._before.number} can't be ended")
            earlier = PutCounts() if self._before is None else self._before.counts
            self._process = _Process(self._spec, self._site, self._mark, self._name, earlier)
            if self._closed:  # meanwhile
                raise CannotServe("the tier is closed")
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine goes on
            self._lose(error)

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        with self._asking() as process:
            if process is not None:
                return process.put(blocks)
        return self._inner.put(blocks)

    @contextmanager
    def _asking(self) -> Iterator[_Process | None]:
        """See `_serving`; nobody else asks meanwhile."""
        with self._lock:
            try:
                yield self._serving()
            except (TierError, RecordError):  # when all answers have come
                raise
            except Exception as error:  # noqa: BLE001 - its next answer may be to another question
                self._lose(error)

    def _serving(self) -> _Process | None:
        """The process, once it takes payloads; None: none did so far, so that nothing that is
        stored waits for one to begin. Raises TierUnavailable for one that does not any more."""
        if self._process is None and self._has_served and not self._closed:
            self._begin()
        if (process := self._process) is None:
            return None
        process.limit(time_left())
        if not process.rows:
            if not process.has_answered(time_left() if self._has_served else 0):
                self._note_late(process)
                return None
            try:
                process.wait_until_open()
            except Exception as error:  # noqa: BLE001 - of its store, too
                self._lose(error)
            else:
                self._has_served, self.puts_here = True, ""
                line = "tier %s: blocks are stored by the process %d, beside the engine's"
                logger.info(line, self._name, process.number)
        return self._process

    def _note_late(self, process: _Process) -> None:
        if self._has_served:
            raise TierUnavailable("the process that stores blocks has yet to open its store")
        if not self.puts_here and time.monotonic() >= process.began + OPEN_SECONDS:
            self._put_here(f"another process has not opened it after {OPEN_SECONDS:g} s")

    def _put_here(self, why: str) -> None:
        self.puts_here = f"blocks are stored by the engine's process (store_process), since {why}"
        logger.warning("tier %s: %s", self._name, self.puts_here)

    def _lose(self, error: Exception) -> None:
        """Forget the process, which is of no use. If one has served this raises TierUnavailable:
        what the engine's never did it does not begin to do in the midst of traffic."""
        process, why = self._process, reason_of(error)
        if process is not None:
            self._before = process  # first, or counts would fall meanwhile
            self._process = None
            why = process.kill() or why
        if self._has_served:
            raise TierUnavailable(f"the process that stores blocks is gone: {why}") from error
        self._put_here(f"another can't ({why})")

    def counts(self) -> PutCounts:
        process, here = self._process or self._before, required(self._inner, Counts).counts()
        return here if process is None else _sum(here, process.counts)

    def warning(self) -> str:
        """What the store that puts says: the process's one said it when it last put."""
        here, process = required(self._inner, Warns).warning(), self._process
        return process.warning if process is not None and process.rows else here

    def resize(self, capacity: int) -> None:
        required(self._inner, Resizable).resize(capacity)
        self._spec = self._spec.model_copy(update={"capacity": capacity})
        with self._asking() as process:
            if process is not None:
                process.resize(capacity)
            elif (opening := self._process) is not None:  # it would set the one of before
                opening.kill()
                self._before = opening
                self._begin()

    def close(self) -> None:
        self._closed = True
        # Not under the lock: a put that hangs would keep the tier from closing.
        with ExitStack() as when_it_is_closed:
            if (process := self._process) is not None:
                process.finish()
                when_it_is_closed.callback(process.close)
            self._inner.close()  # meanwhile: of a tier that hangs an engine waits a second only


class _Process(Beside):
    """A process that has a store open."""

    def __init__(
        self, spec: StoreSpec, site: StoreContext, mark: str, name: str, earlier: PutCounts
    ) -> None:
        """`mark`: of the key under which blocks are looked for. `earlier`: what those before it had
        counted. Raises whatever a beginning may raise."""
        settings = _settings(spec)
        self.counts = self._earlier = earlier
        """What their stores have counted so far."""
        self.warning = ""
        self._payload_bytes = site.payload_bytes
        self.rows: list[int] = []
        """Addresses in its memory for each block of a batch, once it is open."""
        super().__init__(f"put-{name}", "tiers.wrappers.put_server")
        level = logging.getLogger("tiers").getEffectiveLevel()
        place = {"payload_bytes": site.payload_bytes, "num_ranks": site.num_ranks}
        with suppress(OSError):  # one that has ended is noticed when it is waited for
            self.send({"settings": settings, "key_mark": mark, "site": place, "level": level})

    def wait_until_open(self) -> None:
        """Wait until its store is open, and try whether it can be given payloads. Raises what its
        store raised, and what else stands against it."""
        rows: list[int] = self._hear()["rows"]
        nothing = ctypes.c_ubyte()
        self.copy([(ctypes.addressof(nothing), rows[0], 1)])
        self.rows = rows

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """As a store. Raises TierError of a store, and anything else of a process that is gone or
        talks nonsense, or not in time."""
        at_once = max(1, PART_BYTES // self._payload_bytes)
        starts = range(0, len(blocks) or 1, at_once)
        if not any(block.prefix for block in blocks):  # packs are found by the first of a prompt
            starts = starts[::-1]  # what is put last counts as used last
        last = starts[-1]
        gone = {at: self._hand_over(blocks[at : at + at_once], at, at == last) for at in starts}
        is_put = [not gone[at - at % at_once] for at in range(len(blocks))]
        held = iter(each("put", self._hear()["held"], sum(is_put)))
        if (why := gone[0]) is not None and not any(is_put):
            raise why
        return [was_put and next(held) for was_put in is_put]

    def _hand_over(self, blocks: Sequence[Block], first: int, is_last: bool) -> RecordError | None:
        """Copy payloads to the rows from the first on, and have them put. Returns the error of a
        block that the engine has taken back: none of them is put. `is_last`: now it answers."""
        rows = self.rows[first : first + len(blocks)]
        pieces = [
            (address_of(block.payload), row, len(block.payload))
            for block, row in zip(blocks, rows, strict=True)
        ]
        self.copy(pieces)
        prompts: dict[int, tuple[int, Sequence[bytes]]] = {}
        written: list[tuple[str, str | None, tuple[int, int, int] | None]] = []
        gone = None
        for block in blocks:
            try:
                checksum = block.checksum_of_copy()
            except RecordError as error:
                gone, written = error, []
                break
            prefix, at = block.prefix, None
            if prefix is not None:
                number, _ = prompts.setdefault(id(prefix.keys), (len(prompts), prefix.keys))
                at = number, prefix.at, prefix.group
            written.append((block.key.hex(), None if checksum is None else checksum.hex(), at))
        message = {
            "put": written,
            "first": first,
            "prompts": [[key.hex() for key in keys] for _, keys in prompts.values()],
            "is_last": is_last,
            "until": time.monotonic() + time_left(),
        }
        self.send(message)
        return gone

    def resize(self, capacity: int) -> None:
        """As `put`."""
        self.send({"resize": capacity})
        self._hear()

    def _hear(self) -> dict[str, Any]:
        """The next answer. Raises the error that it names, as a TierError."""
        answer = self.receive()
        for name, level, text in answer["logs"]:
            logging.getLogger(name).log(level, "%s", text)
        if "counts" in answer:
            self.counts = _sum(self._earlier, answer["counts"])
        self.warning = answer.get("warning", "")
        if "error" not in answer:
            return answer
        name, text = answer["error"]
        kind: object = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, TierError):
            raise kind(text)
        raise TierError(text)


def _settings(spec: StoreSpec) -> Mapping[str, Any]:
    """The settings as another process makes the same spec of them. Raises CannotServe."""
    try:
        settings: dict[Any, Any] = spec.model_dump(mode="json")
        if make_tier(spec.type, settings) != spec:
            raise CannotServe("they would be others there")
    except Exception as error:
        raise CannotServe(f"its settings can't be handed over: {describe_error(error)}") from error
    return settings


def _sum(counts: PutCounts, more: Iterable[int]) -> PutCounts:
    return PutCounts(*map(add, counts, more))
