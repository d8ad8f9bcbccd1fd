"""A model of CUDA's streams and events, on which the real CUDA copier runs without a device.

What is queued on a stream runs in that stream's order and as late as events allow: only when a host
thread waits for an event behind it. Streams named `eager` run the other way, as soon as no event
keeps them back. The two together order any two streams both ways.

Memory is the host's: an operation of torch that is queued on a stream is kept, and runs on the same
tensors when the stream comes to it. One that would make a real device wait, or that is not known
here, is an error, as is memory of the device that another stream than the one it was made on uses.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.gpu.stub_driver import Driver
from tiers.gpu import cuda
from tiers.gpu.bus import Batch, Bus

Site = tuple[str, int]
"""A line of code: the end of its file's path, and its number."""

READING = "reading"
"""Named among the eager streams, it makes threads eager that read from stores."""
_QUEUED = {"copy_", "index_select", "index_copy_"}
_AT_ONCE = {"__getitem__", "__len__", "__get__", "data_ptr", "stride", "tensor"}


def comes_from(site: Site) -> bool:
    """Whether a line of code has led to the caller."""
    frame = sys._getframe(1)
    path, line = site
    while frame is not None:
        if frame.f_lineno == line and frame.f_code.co_filename.endswith(path):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class Stream:
    """A queue of operations. `device` is of torch's signature, and unused."""

    def __init__(self, model: Model, name: str) -> None:
        self.name = name
        self._model = model
        self._queue: deque[tuple[Mark | None, Callable[[], object]]] = deque()
        self.queued = self.ran = 0
        model.streams.append(self)
        self.cuda_stream = len(model.streams)
        """Its handle."""

    def put(self, operation: Callable[[], object], behind: Mark | None = None) -> None:
        """Queue an operation, which waits for `behind` on another stream."""
        self._queue.append((behind, operation))
        self.queued += 1
        self._model.deepest = max(self._model.deepest, self.queued - self.ran)
        self._model.run_eager()

    def wait_event(self, event: Event) -> None:
        """What is queued from now on waits for the event as it was last recorded."""
        if not self._model.is_taken_away():
            self.put(lambda: None, event.mark)

    def step(self, forced: bool) -> bool:
        """Run the next operation; one that waits for another stream, only if that is `forced`."""
        if not self._queue:
            return False
        behind, operation = self._queue[0]
        if behind is not None and not behind.reached:
            if not forced:
                return False
            behind.reach()
        self._queue.popleft()
        with torch._C.DisableTorchFunction():
            operation()
        self.ran += 1
        return True


class Mark:
    """A place in a stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._place = stream.queued

    @property
    def reached(self) -> bool:
        return self.stream.ran >= self._place

    @property
    def is_followed(self) -> bool:
        """Whether the stream has more to do behind it."""
        return self.stream.queued > self._place

    def reach(self) -> None:
        """Run the stream up to here, and of others only what that waits for."""
        while not self.reached:
            self.stream.step(forced=True)


class Event:
    """As `torch.cuda.Event`: an event never recorded holds nobody back."""

    def __init__(self, model: Model, sleeps: bool) -> None:
        self._model = model
        self._sleeps = sleeps
        self.mark: Mark | None = None

    def query(self) -> bool:
        return self.mark is None or self.mark.reached

    def record(self, stream: Stream) -> None:
        self.mark = Mark(stream)

    def synchronize(self) -> None:
        assert self._sleeps, "a thread would take a core while it waits"
        assert self._model.entered, "a context would be made on the first device"
        if self.mark is not None and not self._model.is_taken_away():
            self._model.before_wait(self.mark)
            self.mark.reach()
            self._model.run_eager()


class Model:
    """One device. `eager`: streams that run as soon as they may, by the names that they get in the
    order in which they are made. `taken_away`: the one wait that is left out, wherever the lines
    that ask for it are."""

    def __init__(self, names: Sequence[str], eager: Collection[str] = ()) -> None:
        self.streams: list[Stream] = []
        self.taken_away: Site | None = None
        self.times_taken_away = 0
        self.fails: Callable[[], None] = lambda: None
        self.before_wait: Callable[[Mark], None] = lambda mark: None
        """Called before a host thread waits."""
        self.deepest = 0
        """The most that any stream has had before it, which a device would not take without end."""
        self.entered = 0
        """How often the device was set for the calling thread, and not yet put back."""
        self._names = iter(names)
        self.eager = eager
        self.compute = Stream(self, "compute")
        self.opening = Stream(self, "opening")
        """What an engine computes on while it opens, perhaps another than later."""
        self._current = [self.compute]
        self._made_on: dict[int, tuple[torch.Tensor, Stream]] = {}
        self._running = False
        self.driver = Driver(self._put_by_driver)
        self.has_batches = True
        """Whether the driver copies batches."""

    def _put_by_driver(self, handle: int, operation: Callable[[], None]) -> None:
        self.fails()
        stream = self.streams[handle - 1]
        assert stream is self._current[-1] is not self.compute
        stream.put(operation)

    def open_bus(self, device: object, stream: Stream) -> Bus:
        """As `open_bus`, which tries nothing here."""
        return Bus(Batch(self.driver) if self.has_batches else None)

    def is_taken_away(self) -> bool:
        """Whether one of the lines that lead here is the one whose wait is left out."""
        if self.taken_away is None or not comes_from(self.taken_away):
            return False
        self.times_taken_away += 1
        return True

    def run_eager(self) -> None:
        """Run the eager streams as far as events allow."""
        if self._running:
            return
        self._running = True
        eager = [stream for stream in self.streams if stream.name in self.eager]
        while any(stream.step(forced=False) for stream in eager):
            pass
        self._running = False

    def synchronize(self, device: object) -> None:
        """As `torch.cuda.synchronize`."""
        if not self.is_taken_away():
            self.drain()

    def drain(self) -> None:
        """Run all that is queued."""
        for stream in self.streams:
            while stream.step(forced=True):
                pass

    def queue(self, operation: Callable[[], object], used: Sequence[Any]) -> None:
        """Queue an operation on the current stream."""
        self.fails()
        stream = self._current[-1]
        assert stream is not self.compute, "a copy would hold up the engine's compute"
        for one in used:
            if isinstance(one, torch.Tensor) and self._storage(one) in self._made_on:
                made_on = self._made_on[self._storage(one)][1]
                assert made_on is stream, f"memory of {made_on.name} is used on {stream.name}"
        stream.put(operation)

    def _storage(self, tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in memory that the current stream's allocations are taken from."""
        copy = self.made(torch.full_like(tensor, -1), on_device=True)
        self.queue(lambda: copy.copy_(tensor), [copy])
        return copy

    def made(self, tensor: torch.Tensor, on_device: bool) -> torch.Tensor:
        """A tensor that is made now; what is on the device is the current stream's memory."""
        if on_device:
            self._made_on[self._storage(tensor)] = (tensor, self._current[-1])
        return tensor

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """As `torch.cuda.stream`."""
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    @contextmanager
    def device(self, device: object) -> Iterator[None]:
        """As `torch.cuda.device`."""
        self.entered += 1
        try:
            # One within another would keep what the other does itself.
            with Operations(self) if self.entered == 1 else nullcontext():
                yield
        finally:
            self.entered -= 1

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Stand in for `torch.cuda`."""
        model = self

        class OurEvent(Event):
            def __init__(self, blocking: bool = False) -> None:
                super().__init__(model, blocking)

        patch.setattr(torch.cuda, "Event", OurEvent)
        patch.setattr(torch.cuda, "Stream", lambda device: Stream(model, next(model._names)))
        patch.setattr(torch.cuda, "current_stream", lambda device: model._current[-1])
        patch.setattr(torch.cuda, "synchronize", model.synchronize)
        patch.setattr(torch.cuda, "stream", model.on)
        patch.setattr(torch.cuda, "device", model.device)
        patch.setattr(cuda, "open_bus", model.open_bus)


class Operations(TorchFunctionMode):
    """While this is entered, torch's operations are queued on the model's current stream."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = model

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, named = func.__name__, dict(kwargs or {})
        if name in _QUEUED:
            assert name != "copy_" or named.get("non_blocking"), "the thread would wait"
            self._model.queue(lambda: func(*args, **named), [*args, *named.values()])
            return None
        if name == "zeros":
            made: torch.Tensor = func(*args, **named).fill_(0xEE)
            self._model.opening.put(made.zero_)
            return made
        if name == "empty":
            named = {**named, "pin_memory": False}
            return self._model.made(func(*args, **named).fill_(-2), "device" in named)
        if name == "pin_memory":
            return args[0].clone()
        if name == "to":
            assert named.get("non_blocking"), "the thread would wait"
            return self._model.to_device(args[0])
        assert name in _AT_ONCE, f"{name} is not modelled"
        return func(*args, **named)


class LateThreads:
    """Executors whose tasks run on the caller's thread: when their end is asked for, or when the
    test says so. So the order of all that happens is the test's."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._executors: list[LateExecutor] = []
        self._rng = random.Random(0)

    def executor(self, count: int, name: str) -> LateExecutor:
        """As `IoExecutor`."""
        is_eager = READING in self._model.eager and name.startswith("read-")
        self._executors.append(LateExecutor(name, is_eager))
        return self._executors[-1]

    def named(self, name: str) -> LateExecutor:
        """The one executor of this name."""
        (found,) = (one for one in self._executors if one.name == name)
        return found

    def wait(self, futures: Collection[Future[Any]], *limits: object) -> None:
        """As `concurrent.futures.wait`, without a limit of time."""
        if self._model.is_taken_away():
            return
        for future in list(futures):
            if isinstance(future, LateFuture):
                future.run()

    def run(self, but: str = "") -> bool:
        """Run a task of some executors, never of those named `but`; False: there was none."""
        ours = [one for one in self._executors if one.name != but]
        ran = [one.run_next() for one in ours if self._rng.random() < 0.5]
        return any(ran) or any(one.run_next() for one in ours)


class LateFuture(Future[Any]):
    """A future whose task runs when its end is asked for."""

    def __init__(self, executor: LateExecutor, task: Callable[[], Any]) -> None:
        super().__init__()
        self._executor = executor
        self.task = task

    def run(self) -> None:
        """Run the executor's tasks up to this one."""
        while not self.done() and self._executor.run_next():
            pass

    def result(self, timeout: float | None = None) -> Any:
        self.run()
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.run()
        return super().exception(0)


class LateExecutor:
    """As `ThreadPoolExecutor`, with one thread; see `LateThreads`. One that `is_eager` runs its
    tasks at once."""

    def __init__(self, name: str, is_eager: bool = False) -> None:
        self.name = name
        self._is_eager = is_eager
        self._tasks: deque[LateFuture] = deque()

    def bind(self, cpus: frozenset[int]) -> None:
        """It has no thread."""

    def submit(self, call: Callable[..., Any], *args: Any) -> LateFuture:
        future = LateFuture(self, lambda: call(*args))
        self._tasks.append(future)
        if self._is_eager:
            self.run_next()
        return future

    def run_next(self) -> bool:
        """Run the next task that was not cancelled; False: there is none."""
        while self._tasks:
            future = self._tasks.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(future.task())
            except Exception as error:  # noqa: BLE001 - raised where the result is asked for
                future.set_exception(error)
            return True
        return False

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        if cancel_futures:
            for future in self._tasks:
                future.cancel()
        while wait and self.run_next():
            pass
