"""What do the engines of a folder do, again and again? A thread asks each, so none waits for one
that hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from spec.errors import one_line
from tiers.concurrency.executors import in_background
from tiers.control.ask_engines import NoAnswer, ask_socket, await_change, sockets
from tiers.control.engine_status import EngineStatus

SECONDS = 1.0
"""Between an engine's answer and its next question."""
REQUESTS = 50
"""The last requests, and the slowest, that are asked for."""
HANGS = "the engine does not answer: it hangs, or is stopped"
Account = Mapping[str, Any]


@dataclass(frozen=True)
class Watched:
    """One engine, as of its last answers."""

    path: Path
    since: float
    """Monotonic time of the last status, or of the first question where none came."""
    status: EngineStatus | None = None
    is_gone: bool = False
    problem: str = ""
    """Why the last question for a status had no answer of use."""
    last: Sequence[Account] | None = None
    """None: it was not asked for its requests yet."""
    slowest: Sequence[Account] = ()
    no_requests: str = ""
    """Why there are none."""

    @property
    def engine(self) -> str:
        return one_line(self.path.stem)


class EnginesWatch:
    """Asks until it is closed. Its daemon threads alone wait: every method returns at once."""

    def __init__(self, folder: Path, engine: str | None = None, seconds: float = SECONDS) -> None:
        """`folder`, `engine`: as of `sockets`. `seconds`: between questions."""
        self.folder = folder
        self._engine = engine
        self._seconds = seconds
        self._closed = threading.Event()
        self._watched: dict[Path, Watched] = {}
        self._asked: set[Path] = set()
        self._explained: Path | None = None
        self._news: dict[Path, str] = {}
        in_background(self._look, "watch-folder")

    def watched(self) -> Sequence[Watched]:
        """The engines by name, those that are gone included."""
        return [found for _, found in sorted(self._watched.copy().items())]

    def explain(self, path: Path | None) -> None:
        """Ask the engine of this socket alone for its requests; None: no engine."""
        self._explained = path

    def pause(self, path: Path, tier: str, paused: str | None) -> None:
        """Have an engine pause a tier's reads, writes or both, or go on; what came of it is the
        engine's `news`."""
        in_background(partial(self._pause, path, tier, paused), "pause")

    def news(self, path: Path) -> str:
        """What came of the last pause of an engine; empty: nothing yet."""
        return self._news.get(path, "")

    def _pause(self, path: Path, tier: str, paused: str | None) -> None:
        try:
            begun = ask_socket(path, "pause", {"tier": tier, "paused": paused}).content
            answer = await_change(begun, lambda asked: ask_socket(path, "change", asked).content)
            done = "goes on" if paused is None else f"is paused: {paused}"
            why = answer["why"] or ("" if answer["over"] else "the change is not over yet")
            news = f"refused: {why}" if why else f"tier {tier} {done}"
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            news = f"refused: {error}"
        self._news[path] = one_line(news)

    def close(self) -> None:
        """Ask no more. A question in flight ends on its own."""
        self._closed.set()

    def _look(self) -> None:
        while not self._closed.is_set():
            try:
                found = sockets(self.folder, self._engine)
            except (NoAnswer, OSError):
                found = []
            for path in found:
                if path not in self._asked:
                    self._asked.add(path)
                    in_background(partial(self._watch, path), "watch-engine")
            self._closed.wait(self._seconds)

    def _watch(self, path: Path) -> None:
        """Ask one engine until its socket is removed."""
        seen = self._watched.get(path, Watched(path, time.monotonic()))
        while not self._closed.is_set():
            try:
                seen = self._ask(seen)
            except FileNotFoundError:
                break
            except ConnectionRefusedError:  # it was killed: its socket stays, for another perhaps
                seen = replace(seen, is_gone=True)
            self._watched[path] = seen
            self._closed.wait(self._seconds)
        if path in self._watched:
            self._watched[path] = replace(seen, is_gone=True)
        self._asked.discard(path)

    def _ask(self, seen: Watched) -> Watched:
        """Raises FileNotFoundError and ConnectionRefusedError where it is gone."""
        seen = replace(seen, is_gone=False)
        if seen.status is None:
            self._watched.setdefault(seen.path, seen)
        try:
            content = ask_socket(seen.path, "status", {}).content
            status = EngineStatus.model_validate(content)
        except ValidationError:
            return replace(seen, problem="its answer is another version's; use its kvtiers")
        except (FileNotFoundError, ConnectionRefusedError):
            raise
        except (TimeoutError, BlockingIOError):  # the latter: its queue of clients is full
            return replace(seen, problem=HANGS)
        except (OSError, ValueError, RecursionError) as error:
            return replace(seen, problem=one_line(str(error)))
        seen = replace(seen, status=status, since=time.monotonic(), problem="")
        return self._ask_requests(seen) if self._explained == seen.path else seen

    def _ask_requests(self, seen: Watched) -> Watched:
        try:
            last = ask_socket(seen.path, "explain", {"last": REQUESTS}).content
            slowest = ask_socket(seen.path, "explain", {"slowest": REQUESTS}).content
        except (OSError, ValueError, RecursionError) as error:
            return replace(seen, last=(), slowest=(), no_requests=one_line(str(error)))
        answers = (last, slowest)
        if not all(isinstance(a, list) and all(isinstance(b, dict) for b in a) for a in answers):
            return replace(seen, no_requests="its answer is another version's; use its kvtiers")
        return replace(seen, last=last[::-1], slowest=slowest, no_requests="")
