"""Checksums of slots by a process beside the engine's, a copy of whose payloads it is given.

Who computes one here asks for the interpreter's lock again behind each block, and an engine's
thread that launches small kernels sleeps 36 us until it has the lock back; here it does so a few
times for 32 MiB. `serve` is the process, which has neither a store nor torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice, repeat

from tiers.block import digest
from tiers.concurrency.beside import Beside, CannotServe, offered, receive, send, serving
from tiers.host.scratch import Scratch
from tiers.host.slots import slot_stride

PART_BYTES = 32 << 20
"""Payloads that are copied at once, one block at least: who stores waits for 64 slots anyway."""
ANSWER_SECONDS = 2.0
"""How long an answer may take, which is there in milliseconds: tiers wait for it before they put,
and their puts have 10 s."""


class DigestProcess(Beside):
    """The process. Used by one thread."""

    def __init__(self, payload_bytes: int) -> None:
        """Raises whatever a beginning may raise. Does not wait."""
        super().__init__("digests", __name__)
        self._payload_bytes = payload_bytes
        self._rows: list[int] = []
        self.limit(ANSWER_SECONDS)
        self.send({"payload_bytes": payload_bytes})

    def is_ready(self) -> bool:
        """Whether it can be asked, or has ended, which the next call finds."""
        return bool(self._rows) or self.has_answered()

    def digests(self, addresses: Iterable[int]) -> list[bytes]:
        """The digests of payloads here. Raises OSError, EOFError, ValueError and CannotServe, and
        more for nonsense; it is of no use then."""
        if not self._rows:
            answer = self.receive()
            if "error" in answer:
                raise CannotServe(answer["error"])
            self._rows = answer["rows"]
        half, first = len(self._rows) // 2, 0
        left, asked, found = iter(addresses), deque[int](), list[bytes]()
        while part := [*islice(left, half)]:
            if len(asked) == 2:  # it is done with the rows that come next
                found += self._hear(asked.popleft())
            rows = self._rows[first : first + len(part)]
            sizes = repeat(self._payload_bytes)
            self.copy([*zip(part, rows, sizes, strict=False)])
            self.send({"digest": [first, len(part)]})
            asked.append(len(part))
            first = half - first
        for count in asked:
            found += self._hear(count)
        return found

    def _hear(self, count: int) -> list[bytes]:
        size = len(digest(b""))
        found = self.read(count * size)
        return [found[at : at + size] for at in range(0, len(found), size)]

    def close(self) -> None:
        self.finish()
        self.kill()


def serve(handle: int, parent: int) -> None:
    """Do what the engine's process, `parent`, asks for through this socket."""
    with serving(handle, parent) as engine:
        size = receive(engine)["payload_bytes"]
        stride = slot_stride(size)
        rows = range(0, 2 * max(1, PART_BYTES // size) * stride, stride)
        with Scratch(len(rows) * stride).borrow() as memory:
            try:
                send(engine, {"rows": offered(memory, rows)})
            except OSError as error:
                send(engine, {"error": str(error)})
            while True:
                first, count = receive(engine)["digest"]
                some = rows[first : first + count]
                engine.sendall(b"".join(digest(memory[row : row + size]) for row in some))
