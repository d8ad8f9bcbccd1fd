"""Who records the traffic? The recorder takes requests that ended, and has them written."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from spec.chain import RecordSpec
from tiers.concurrency.executors import start_thread
from tiers.concurrency.handoff import Handoff
from tiers.concurrency.repeated_log import RepeatedLog
from tiers.errors import RecordingError
from tiers.traces.recorded import FileHeader, encode_header, encode_request
from tiers.traces.recorder_files import RecordFolder
from tiers.traces.trace import TraceRequest

ID_BITS = 53
"""So that readers of JSON in any language get ids whole: many keep numbers as doubles. Among ten
million different blocks there are two of one id with a chance of 0.6 percent."""
_DIGEST_BYTES = 8


class KeyedIds:
    """Makes ids of blocks and digests of names by keyed BLAKE2b (RFC 7693). A reader
    of the trace without the key can't verify a guess of a prompt or a name in it."""

    def __init__(self, key: bytes, facts: bytes) -> None:
        """`key`: 32 bytes. `facts`: all that a block depends on beside its hash. Engines
        that differ in it have different ids."""
        self._names = key
        blocks = hashlib.blake2b(b"blocks\0" + facts, digest_size=32, key=key).digest()
        self._blocks = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=blocks)

    def of_blocks(self, hashes: Iterable[bytes], mark: bytes = b"") -> list[int]:
        """The ids of blocks, by their hashes, which stand for all blocks before them, too. `mark`:
        what these blocks depend on beside that. All hashes are of one length."""
        keyed, number = self._blocks.copy, int.from_bytes
        shift = 8 * _DIGEST_BYTES - ID_BITS
        ids = []
        for one in hashes:
            state = keyed()  # half of the time is in the key
            state.update(one + mark)
            ids.append(number(state.digest(), "little") >> shift)
        return ids

    def of_name(self, name: str) -> str:
        """The digest of a name, as hexadecimal digits."""
        text = b"name\0" + name.encode(errors="surrogatepass")
        return hashlib.blake2b(text, digest_size=_DIGEST_BYTES, key=self._names).hexdigest()


logger = logging.getLogger(__name__)

FLUSH_SECONDS = 1.0
_FLUSH_BYTES = 1 << 20
TIDY_SECONDS = 60.0
RETRY_SECONDS = 1.0, 60.0
"""How long a folder that failed is left alone, at first and at most."""
_CHUNK = 256
_PAUSE = 1e-4
"""After a chunk of ids, which takes half a millisecond, the thread releases the interpreter for a
pause. The scheduler's thread would have to wait for its turn for five milliseconds otherwise."""


class EndedRequest(NamedTuple):
    """A request that has ended. Times are seconds of the recording's clock."""

    arrived: float
    since: float
    """When the first request came that has not ended."""
    prompt_tokens: int
    answer_tokens: int
    hashes: Sequence[bytes]
    """The engine's, one for `hash_tokens` tokens each, answer included; nobody changes it now."""
    salt: str
    marks: Sequence[tuple[range, bytes]] = ()
    """What blocks depend on beside their hashes, such as an adapter or an image: runs of blocks,
    from the first on, each with one mark; none: there is nothing."""


@dataclass(frozen=True)
class Recording:
    """The settings of a recording. `block_tokens`, `hash_tokens`: see `EngineInfo`. `facts`: see
    `KeyedIds`. `kv_bytes_per_token`: see `FileHeader`; asked for each file. `now`: the clock
    of requests' times, in seconds."""

    spec: RecordSpec
    block_tokens: int
    hash_tokens: int
    facts: bytes = b""
    kv_bytes_per_token: Callable[[], int | None] = lambda: None
    now: Callable[[], float] = time.monotonic


def writer_name(host: str, pid: int) -> str:
    """A process's name in the names of the files that it records."""
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', host)[:64]}-{pid}"


class RecordWriter:
    """Writes lines into the folder of a recording, as long as that works. A folder that fails is
    tried again later; meanwhile requests are dropped."""

    def __init__(self, recording: Recording) -> None:
        self.recorded = self.dropped = 0
        """Requests that were written, and requests that were not."""
        self._recording = recording
        self._began = recording.now()
        self._began_unix = time.time() * 1000
        self._name = writer_name(socket.gethostname(), os.getpid())
        spec = recording.spec
        self._path = spec.path
        self._folder = RecordFolder(spec.path, spec.max, spec.keep, self._name, self._header)
        self._is_open = False
        self._ids = KeyedIds(b"", b"")
        self._lines: list[bytes] = []
        self._waiting = 0
        self._flushes = self._tidies = self._tries = 0.0
        self._pause = RETRY_SECONDS[0]
        self._error = ""
        self._failed = RepeatedLog(logger, f"record {spec.path}", "requests were not recorded")

    def open(self) -> None:
        """Begin, on the thread that will call the others."""
        if self._opens():
            logger.info("record: requests are recorded in %s", self._path)

    def write(self, ended: EndedRequest) -> None:
        """Take a request's line to the others that wait, and write them if they are many."""
        if not self._opens():
            self._drop(1)
            return
        line = self._line(ended)
        self._lines.append(line)
        self._waiting += len(line)
        if self._waiting >= _FLUSH_BYTES:
            self._flush()

    def tick(self) -> None:
        """Write what has waited for long enough, and delete what is too old."""
        now = time.monotonic()
        if self._lines and now >= self._flushes:
            self._flush()
        if self._is_open and now >= self._tidies:
            self._tidies = now + TIDY_SECONDS
            self._works(self._folder.rotate)

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._flush()
        self._works(self._folder.close)

    def _opens(self) -> bool:
        """Open the folder if it is not, unless that failed a moment ago; whether it is open."""
        if not self._is_open and time.monotonic() >= self._tries:
            self._is_open = self._works(self._open)
        return self._is_open

    def _open(self) -> None:
        self._ids = KeyedIds(self._folder.open(), self._recording.facts)

    def _header(self) -> bytes:
        recording = self._recording
        return encode_header(
            FileHeader(
                recording.block_tokens,
                self._began_unix,
                f"{self._name}-{self._began_unix:.0f}",
                recording.kv_bytes_per_token(),
            )
        )

    def _line(self, ended: EndedRequest) -> bytes:
        tokens = self._recording.block_tokens
        in_prompt = ended.prompt_tokens // tokens
        # The KV of the last token is not computed.
        whole = (ended.prompt_tokens + max(ended.answer_tokens - 1, 0)) // tokens
        ids = self._block_ids(ended, whole)
        request = TraceRequest(
            (ended.arrived - self._began) * 1000,
            ended.prompt_tokens,
            ended.answer_tokens,
            ids[:in_prompt],
            self._ids.of_name(ended.salt) if ended.salt else None,
            ids[in_prompt:],
        )
        return encode_request(request, (ended.since - self._began) * 1000)

    def _block_ids(self, ended: EndedRequest, blocks: int) -> list[int]:
        step = self._recording.block_tokens // self._recording.hash_tokens
        ids: list[int] = []
        for run, mark in ended.marks or ((range(blocks), b""),):
            stop = min(run.stop, blocks)
            each = ended.hashes[run.start * step + step - 1 : stop * step : step]
            for at in range(0, len(each), _CHUNK):
                ids += self._ids.of_blocks(each[at : at + _CHUNK], mark)
                time.sleep(_PAUSE)
        return ids

    def _flush(self) -> None:
        lines, self._lines, self._waiting = self._lines, [], 0
        self._flushes = time.monotonic() + FLUSH_SECONDS
        if not lines:
            return
        if not self._is_open:
            self._drop(len(lines))
        elif self._works(lambda: self._folder.append(b"".join(lines)), len(lines)):
            self.recorded += len(lines)
            self._pause = RETRY_SECONDS[0]

    def _works(self, call: Callable[[], None], requests: int = 0) -> bool:
        """Whether a call works. If not, `requests` are dropped, and the folder is left alone for a
        while."""
        try:
            call()
        except (OSError, RecordingError) as error:
            is_ours = isinstance(error, RecordingError)
            self._error = str(error) if is_ours else f"{self._path}: {error}"
            self._drop(requests)
        else:
            return True
        with suppress(OSError):
            self._folder.close()
        self._is_open = False
        self._tries = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, RETRY_SECONDS[1])
        return False

    def _drop(self, requests: int) -> None:
        self.dropped += requests
        self._failed.log(
            "record: %s. Requests are not recorded until this works", self._error, count=requests
        )


MAX_REQUESTS = 4096
MAX_BLOCKS = 1 << 18
"""What may wait to be written: requests, and hashes of their blocks, which take 65 bytes each."""
POLL_SECONDS = 0.25
"""The thread looks for itself, so that the scheduler's thread need not wake it."""
CLOSE_SECONDS = 2.0


class Recorder:
    """Writes a trace on a thread of its own. Requests that come faster than it writes, or can't be
    written, are counted as dropped; a fork's child records none. Everything here is for the
    scheduler's thread alone, and never waits, but `close`."""

    def __init__(self, recording: Recording) -> None:
        self._writer = RecordWriter(recording)
        self._handoff: Handoff[EndedRequest] = Handoff(MAX_REQUESTS, MAX_BLOCKS)
        self._stop = threading.Event()
        self._dropped = 0
        self._reported = (0, 0)
        self._late = RepeatedLog(logger, "record", "requests came faster than they were recorded")
        self._thread = start_thread(self._write, "record")

    def put(self, ended: EndedRequest) -> None:
        if not self._handoff.give(ended, len(ended.hashes)):
            self._dropped += 1
            self._late.log("record: requests come faster than they are recorded; some are dropped")

    def take_counts(self) -> dict[str, float]:
        """How many requests were recorded and dropped since the last call, by their counters."""
        before = self._reported
        now = (self._writer.recorded, self._writer.dropped + self._dropped)
        if now == before:
            return {}
        self._reported = now
        return {"recorded_requests": now[0] - before[0], "record_dropped": now[1] - before[1]}

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write what waits, for at most `seconds`."""
        self._stop.set()
        self._thread.join(seconds)

    def _write(self) -> None:
        self._writer.open()
        stopping = False
        while not stopping:
            stopping = self._stop.wait(POLL_SECONDS)
            while (ended := self._handoff.take()) is not None:
                self._writer.write(ended)
            self._writer.tick()
        self._writer.close()
