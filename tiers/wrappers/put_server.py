"""The process beside an engine's that puts blocks into one store (see `put_process`)."""

from __future__ import annotations

import logging
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import chain, repeat
from operator import itemgetter
from typing import Any

from spec.errors import reason_of
from spec.offloading import StoreContext, StoreSpec
from spec.registry import make_tier
from tiers.breaker import RETRY_AFTER, RETRY_AFTER_MAX
from tiers.concurrency.beside import offered, receive, send, serving
from tiers.errors import TierUnusable
from tiers.host.scratch import Scratch
from tiers.host.slots import slot_stride
from tiers.store import (
    Counts,
    GatheredBlock,
    Prefix,
    Reaches,
    Resizable,
    TierStore,
    Waiting,
    Warns,
    batch_blocks,
    capability,
    each,
)
from tiers.wrappers.opening import open_unguarded
from tiers.wrappers.reopening import FOR_NOW

MOST_LINES = 1000
"""Log lines that wait for the next answer; of more the oldest are lost."""

Message = Mapping[str, Any]


def serve(handle: int, parent: int) -> None:
    """Do what the engine's process, `parent`, asks for through this socket."""
    with serving(handle, parent) as engine, ExitStack() as stack:
        _Server(engine, stack).run()


class _Lines(logging.Handler):
    """Keeps what is logged here for the engine's log."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[tuple[str, int, str]] = deque(maxlen=MOST_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.append((record.name, record.levelno, self.format(record)))
        except Exception:  # noqa: BLE001 - as other handlers do
            self.handleError(record)

    def take(self) -> list[tuple[str, int, str]]:
        """What was logged since the last call."""
        return [self._lines.popleft() for _ in repeat(None, len(self._lines))]


class _Server:
    def __init__(self, engine: socket.socket, stack: ExitStack) -> None:
        """`stack` closes the store and gives the memory back."""
        self._engine, self._stack = engine, stack
        self._arrivals = select.poll()  # `select.select` takes no file whose number is 1024 or more
        self._arrivals.register(engine, select.POLLIN)
        self._lines = _Lines()
        logging.getLogger().addHandler(self._lines)
        self._store: TierStore | None = None
        self._is_reached = False
        self._rows: list[memoryview] = []

    def run(self) -> None:
        """Answer all that comes. Raises EOFError and ConnectionError when nothing does any more."""
        self._answer(receive(self._engine), self._open)
        while True:
            message = receive(self._engine)
            self._answer(message, self._put if "put" in message else self._resize)

    def _answer(self, message: Message, act: Callable[[Message], Mapping[str, Any]]) -> None:
        try:
            answer = act(message)
        except Exception as error:  # noqa: BLE001 - a store's, which the guard is to hear of
            answer = {"error": [type(error).__name__, reason_of(error)]}
        so_far: dict[str, Any] = {}
        if self._store is not None:
            if (counts := capability(self._store, Counts)) is not None:
                so_far["counts"] = counts.counts()
            with suppress(Exception):  # a plugin's; its put has its answer all the same
                if (warns := capability(self._store, Warns)) is not None:
                    so_far["warning"] = str(warns.warning())
        send(self._engine, {**answer, **so_far, "logs": self._lines.take()})

    def _open(self, message: Message) -> dict[str, Any]:
        logging.getLogger("tiers").setLevel(message["level"])
        settings, site = message["settings"], StoreContext(**message["site"])
        spec = make_tier(settings["type"], settings)
        if not isinstance(spec, StoreSpec):
            raise TierUnusable(f"type {spec.type} is no store")
        pause = RETRY_AFTER
        while self._store is None:
            try:
                self._store = open_unguarded(spec, site, message["key_mark"])
            except FOR_NOW:  # as beside a process that stands still
                if self._arrivals.poll(1000 * pause):  # the engine says that it ends
                    raise
                pause = min(2 * pause, RETRY_AFTER_MAX)
        self._stack.callback(self._store.close)
        size, stride = site.payload_bytes, slot_stride(site.payload_bytes)
        starts = range(0, batch_blocks(size) * stride, stride)
        memory = self._stack.enter_context(Scratch(len(starts) * stride).borrow())
        self._rows = [memory[start : start + size] for start in starts]
        return {"rows": offered(memory, starts)}

    def _ready(self) -> TierStore:
        store = self._store
        if store is None:
            raise TierUnusable("its store is not open")
        if not self._is_reached and (elsewhere := capability(store, Reaches)) is not None:
            elsewhere.reach()
        self._is_reached = True
        return store

    def _put(self, message: Message) -> dict[str, Any]:
        """Put the blocks of this message and of those behind it, up to the last one. They are
        parts of a batch in a row, from its first on or from its last."""
        held: dict[int, Sequence[bool]] = {}
        errors = []
        while True:
            messages = [message]
            # What has come meanwhile is put by one call: each costs an index a transaction.
            with suppress(EOFError):  # the next look finds it, too
                while not messages[-1]["is_last"] and self._arrivals.poll(0):
                    messages.append(receive(self._engine))
            is_last = messages[-1]["is_last"]
            messages.sort(key=itemgetter("first"))
            first = messages[0]["first"]
            try:
                held[first] = self._put_at_once(messages)
            except Exception as error:  # noqa: BLE001 - a store's; those behind may be stored
                errors.append(error)
                held[first] = [False for part in messages for _ in part["put"]]
            if is_last:
                break
            message = receive(self._engine)
        answers = [*chain.from_iterable(held[first] for first in sorted(held))]
        if errors and not any(answers):
            raise errors[0]
        return {"held": answers}

    def _put_at_once(self, messages: Sequence[Message]) -> Sequence[bool]:
        store, until = self._ready(), messages[0]["until"]
        blocks = [*chain.from_iterable(map(self._blocks, messages))]
        with Waiting(lambda: until - time.monotonic()):  # all processes have this clock
            return each("put", store.put(blocks), len(blocks)) if blocks else ()

    def _blocks(self, message: Message) -> list[GatheredBlock]:
        prompts = [[*map(bytes.fromhex, keys)] for keys in message["prompts"]]
        blocks = []
        for row, (key, checksum, at) in enumerate(message["put"], message["first"]):
            known = None if checksum is None else bytes.fromhex(checksum)
            prefix = None if at is None else Prefix(prompts[at[0]], *at[1:])
            payload = self._rows[row].toreadonly()
            blocks.append(GatheredBlock(bytes.fromhex(key), payload, known, prefix))
        return blocks

    def _resize(self, message: Message) -> dict[str, Any]:
        if (resizable := capability(self._ready(), Resizable)) is not None:
            resizable.resize(message["resize"])
        return {}
