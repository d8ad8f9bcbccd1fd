"""Who records the traffic? The recorder takes requests that ended, and has them written."""

from __future__ import annotations

import logging
import os
import threading

from tiers.concurrency.handoff import Handoff
from tiers.concurrency.repeated_log import RepeatedLog
from tiers.traces.recorder_writer import Began, EndedRequest, Recording, RecordWriter

logger = logging.getLogger(__name__)

MAX_REQUESTS = 4096
MAX_BLOCKS = 1 << 18
"""What may wait to be written: requests, and hashes of their blocks, which take 65 bytes each."""
POLL_SECONDS = 0.25
"""The thread looks for itself, so that the scheduler's thread need not wake it."""
CLOSE_SECONDS = 2.0


class Recorder:
    """Writes a trace on a thread of its own. What comes faster than it is written, or can't be
    written, is counted as dropped. Everything here is for the scheduler's thread alone, and never
    waits, but `close`."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._dropped = 0
        self._told = (0, 0)
        self._late = RepeatedLog(logger, "record", "requests came faster than they were recorded")
        self._start()

    def put(self, ended: EndedRequest) -> None:
        """Record a request."""
        if os.getpid() != self._process:
            # A fork leaves the thread and the files to the parent.
            self._writer.leave()
            self._start(self._writer.began)  # requests came before the fork
        if not self._handoff.give(ended, len(ended.hashes)):
            self._dropped += 1
            self._late.log("record: requests come faster than they are recorded; some are dropped")

    def take_counts(self) -> dict[str, float]:
        """How many requests were recorded and dropped since the last call, by their counters."""
        told = self._told
        now = (self._writer.recorded, self._writer.dropped + self._dropped)
        if now == told:
            return {}
        self._told = now
        return {"recorded_requests": now[0] - told[0], "record_dropped": now[1] - told[1]}

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write what waits, for so many seconds at most."""
        self._stop.set()
        if os.getpid() == self._process:
            self._thread.join(seconds)

    def _start(self, began: Began | None = None) -> None:
        self._process = os.getpid()
        self._handoff: Handoff[EndedRequest] = Handoff(MAX_REQUESTS, MAX_BLOCKS)
        self._stop = threading.Event()
        self._writer = RecordWriter(self._recording, began)
        self._dropped = 0
        self._told = (0, 0)
        run = (self._writer, self._handoff, self._stop)
        self._thread = threading.Thread(target=_run, args=run, name="kvtiers-record", daemon=True)
        self._thread.start()


def _run(writer: RecordWriter, handoff: Handoff[EndedRequest], stop: threading.Event) -> None:
    writer.open()
    stopping = False
    while not stopping:
        stopping = stop.wait(POLL_SECONDS)
        while (ended := handoff.take()) is not None:
            writer.write(ended)
        writer.tick()
    writer.close()
