"""`kvtiers check`: the kit on a tier type, by its spec alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from traceback import extract_tb
from typing import NamedTuple
from unittest import SkipTest

from spec.errors import describe_error
from spec.offloading import StoreContext, StoreSpec
from tiers.store import TierStore
from tiers.testing.contract import StoreContract
from tiers.testing.limits import Endless

Place = Callable[[str], StoreSpec]
"""Gives the tier in an empty place of this name."""


class Result(NamedTuple):
    """What became of one test. `fate`: passed, skipped or failed; `why`: in a line."""

    test: str
    fate: str
    why: str = ""
    is_endless: bool = False


class SpecKit(StoreContract):
    """The kit of a store that its spec opens. What the spec does not say is not claimed."""

    shared = True  # an engine's processes each open it

    def __init__(self, spec: StoreSpec, limit_seconds: float) -> None:
        self._spec = spec
        self.limit_seconds = limit_seconds

    def make_spec(self) -> StoreSpec:
        return self._spec

    def open_store(self, payload_bytes: int) -> TierStore:
        store: TierStore = self._spec.open(StoreContext(payload_bytes))
        return store

    def test_the_spec_says_whether_it_verifies(self) -> None:
        raise SkipTest("only a test class reaches the bytes that are stored")


def check(place: Place, limit_seconds: float) -> Iterator[Result]:
    """Run each test of the kit, in a place of its own; yields as they end. Raises what `place`
    raises for a tier that can't be moved there."""
    place("moved")
    for name in (name for name in dir(SpecKit) if name.startswith("test_")):
        yield _tried(name, place, limit_seconds)


def _tried(name: str, place: Place, limit_seconds: float) -> Result:
    test = name.removeprefix("test_").replace("_", " ")
    try:
        getattr(SpecKit(place(name), limit_seconds), name)()
    except SkipTest as skipped:
        return Result(test, "skipped", str(skipped))
    except Endless as error:
        return Result(test, "failed", str(error), is_endless=True)
    except AssertionError as error:
        return Result(test, "failed", str(error) or "an answer is wrong")
    except KeyboardInterrupt:  # the user's own
        raise
    except BaseException as error:  # noqa: BLE001 - a plugin's code may raise anything
        return Result(test, "failed", _where(error))
    return Result(test, "passed")


def _where(error: BaseException) -> str:
    """An error's first line, and the line of code that raised it."""
    last = extract_tb(error.__traceback__)[-1]
    return f"{describe_error(error).partition(chr(10))[0]} ({last.filename}:{last.lineno})"
