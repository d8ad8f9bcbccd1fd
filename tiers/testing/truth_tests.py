"""Tests of whether a store and its spec say what is so: of errors, and in the spec's flags."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from operator import ge
from unittest import SkipTest

from spec.offloading import StoreContext
from tiers.store import Clear, LocalIndex, Measured, Resizable, TierStore, Touch, capability, each
from tiers.testing.devices import failing_devices, failing_writes, watched
from tiers.testing.harness import Memory, StoreUnderTest, make_key
from tiers.testing.limits import within

PROMPT_SECONDS = 5.0
"""How long `peek` may take while a `put` waits for its device; it takes no wait at all."""
HEAL_SECONDS = 15.0


class TruthTests(StoreUnderTest):
    """What the guard and the scheduler believe."""

    host_local: bool | None = None
    """What the spec's `host_local` must be; unset: it is not compared."""

    def failing(self, store: TierStore) -> AbstractContextManager[None]:
        """Meanwhile the place of the open store fails. By default what Python does with files and
        sockets does, and no file can grow; a store over a library of C may know better."""
        return failing_devices()

    def test_errors_are_raised(self) -> None:
        """The guard counts what is raised, and leaves the tier alone. A miss would hide it."""
        keys, new, fresh = ([make_key() for _ in range(count)] for count in (4, 2, 2))
        hidden: list[str] = []
        stored = [False, False]
        with self.opened() as store:
            self.put(store, keys)
            memory = Memory(keys, self.payload_bytes)
            given = Memory(new, self.payload_bytes).fill()
            with self.failing(store):
                with suppress(Exception):
                    stored = each("put", store.put(given.readonly()), 2)
                with suppress(Exception):
                    if False in store.get(memory.blocks):
                        hidden.append("get")
                with suppress(Exception):
                    if False in store.has(keys):
                        hidden.append("has")
                dropped = False
                with suppress(Exception):
                    store.drop(keys[:1])
                    dropped = True
            assert not hidden, f"{' and '.join(hidden)} answer a miss where the place fails"
            held = self._healed(store, [*new, *keys])
            kept = all(map(ge, held, stored))  # of the first two, those that put says it stored
            assert kept, "put says True for what it could not store"
            assert all(held[3:]), "blocks are lost after a failure"
            assert not (dropped and held[2]), "drop hides that it failed"
            until = time.monotonic() + HEAL_SECONDS
            while self.put_some(store, fresh) != [True] * 2:
                assert time.monotonic() < until, "it takes no block after a failure"
                time.sleep(0.05)
            assert self.hits(store, fresh) == [True] * 2

    def test_what_could_not_be_written_is_not_held(self) -> None:
        """Where there is room, and all else works, as on a device that is worn out."""
        for of_all in (True, False):
            self._check_writes_that_fail(of_all)

    def _check_writes_that_fail(self, of_all: bool) -> None:
        keys, new = ([make_key() for _ in range(8)] for _ in range(2))
        stored, raised = [False] * 8, False
        with self.opened() as store:
            self.put(store, keys)
            store.drop(keys)
            given = Memory(new, self.payload_bytes).fill()
            with failing_writes(of_all):
                try:
                    stored = each("put", store.put(given.readonly()), 8)
                except Exception:  # noqa: BLE001 - whatever it raises is counted
                    raised = True
            assert any(stored) or raised, "put hides that it could write nothing"
            kept = all(map(ge, self._healed(store, new), stored))
            assert kept, "put says True for what it could not write"

    def _healed(self, store: TierStore, keys: list[bytes]) -> list[bool]:
        """Which blocks are served when the place is well again: connections may be made anew."""
        until = time.monotonic() + HEAL_SECONDS
        while True:
            try:
                return self.hits(store, keys)
            except AssertionError:
                raise
            except Exception:
                if time.monotonic() > until:
                    raise
            time.sleep(0.05)

    def test_the_spec_says_who_finds_the_blocks(self) -> None:
        declared: object = self.make_spec().host_local
        assert declared is None or type(declared) is bool, f"host_local is {declared!r}"
        with self.opened() as store:
            is_cleared = capability(store, Clear) is not None
            assert not (declared is False and is_cleared), (
                "host_local is False, and the store has `clear`, which takes other hosts' blocks"
            )
        if self.host_local is not None:
            assert declared == self.host_local, (
                f"the spec's host_local is {declared}, {type(self).__name__} says {self.host_local}"
            )

    def test_the_spec_comes_back_from_json(self) -> None:
        spec = self.make_spec()  # which goes so to processes and to engines that serve
        again = type(spec).model_validate(spec.model_dump(mode="json"))
        lost = [name for name, value in spec if getattr(again, name) != value]
        assert not lost, f"{lost} do not come back from JSON; of a secret name its file"

    def test_the_spec_says_what_its_capacity_is(self) -> None:
        spec = self.make_spec()
        with closing(spec.open(StoreContext(self.payload_bytes))) as store:
            measured = self.having(store, Measured)
            if not spec.capacity_bytes:
                raise SkipTest(f"{type(spec).__name__} has no capacity")
            usage = measured.usage()
            assert usage.capacity is not None, "the spec has a capacity, and usage says none"
            assert usage.capacity <= spec.capacity_bytes, f"{usage} of {spec.capacity_bytes} bytes"

    def test_the_spec_says_whether_it_resizes(self) -> None:
        spec = self.make_spec()
        with self.opened() as store:
            if spec.resizes:
                assert capability(store, Resizable) is not None, "resizes is True without `resize`"

    def test_a_prompt_store_never_waits(self) -> None:
        """The engine's own thread asks it: neither I/O nor a lock that is held during I/O."""
        spec = self.make_spec()
        if not spec.is_prompt:
            raise SkipTest(f"{type(spec).__name__}.is_prompt is False")
        keys = [make_key() for _ in range(16)]
        with self.opened() as store:
            self.put(store, keys[:8])
            index = self._index_of(store)
            touch = capability(store, Touch)

            def look() -> None:
                index.peek(keys)
                if touch is not None:
                    touch.touch(keys)

            with _without_io(threading.get_ident()):
                look()
            more = Memory(keys[8:], self.payload_bytes).fill().readonly()
            with _held_up(lambda: store.put(more)):
                within(PROMPT_SECONDS, look)

    def _index_of(self, store: TierStore) -> LocalIndex:
        until = time.monotonic() + HEAL_SECONDS
        while (index := capability(store, LocalIndex)) is None:
            assert time.monotonic() < until, "is_prompt is True, and the store has no `peek`"
            time.sleep(0.01)
        return index


@contextmanager
def _without_io(thread: int) -> Iterator[None]:
    def refuse(name: str) -> None:
        if threading.get_ident() == thread:
            raise AssertionError(f"is_prompt is True, and peek or touch calls {name}")

    with watched(refuse):
        yield


@contextmanager
def _held_up(call: Callable[[], object]) -> Iterator[None]:
    """Meanwhile the call runs on another thread, and its first I/O there does not end."""
    go_on, began = threading.Event(), threading.Event()
    here = threading.get_ident()

    def wait(name: str) -> None:
        if threading.get_ident() != here and threading.current_thread().name != "kit":
            began.set()
            go_on.wait(PROMPT_SECONDS + 10)

    def body() -> None:
        with suppress(Exception):
            call()
        began.set()

    caller = threading.Thread(target=body, name="put of the kit")
    with watched(wait):
        caller.start()
        try:
            began.wait(PROMPT_SECONDS)
            yield
        finally:
            go_on.set()
            caller.join(PROMPT_SECONDS)
