"""Requests of an object store that fail: which are sent again, and what is said of the others."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

obstore = pytest.importorskip("obstore")

from obstore.exceptions import GenericError, PermissionDeniedError  # noqa: E402
from obstore.store import MemoryStore  # noqa: E402

from tests.support.clock import Clock  # noqa: E402
from tiers.block import NAMESPACE_BYTES  # noqa: E402
from tiers.errors import TierFull, TierRefused, TierUnavailable, TierUnusable  # noqa: E402
from tiers.remote.object import obstore_bucket  # noqa: E402
from tiers.remote.object.obstore_bucket import ObstoreBucket, RetryBudget  # noqa: E402
from tiers.remote.packs.bucket import BucketMarks  # noqa: E402
from tiers.remote.packs.pack import name_of  # noqa: E402
from tiers.store import Waiting  # noqa: E402
from tiers.testing import make_key  # noqa: E402

BUSY = "Server returned non-2xx status code: 503 Service Unavailable"
FULL = "Server returned non-2xx status code: 507 Insufficient Storage"
DENIED = "Server returned non-2xx status code: 403 Forbidden: <Code>InvalidAccessKeyId</Code>"


class Troubled:
    """A bucket in memory, whose next requests fail with `errors`, the last first. `takes`: seconds
    of a request. `pauses`: before those that were sent again. `made`: how often its client was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors: list[Exception] = []
        self.sent = self.made = 0
        self.takes = 0.0
        self.pauses: list[float] = []
        self.clock, self.memory = Clock(), MemoryStore()
        self.time = SimpleNamespace(monotonic=self.clock, sleep=self.pauses.append)
        monkeypatch.setattr(obstore_bucket, "time", self.time)
        jitter = SimpleNamespace(uniform=lambda low, high: (low + high) / 2)
        monkeypatch.setattr(obstore_bucket, "random", jitter)
        for verb in ("put", "get", "delete"):
            monkeypatch.setattr(obstore, verb, self._failing(getattr(obstore, verb)))
        self.bucket = ObstoreBucket(self._make, "s3://kv", "/a/b/", timeout=10)

    def _make(self) -> Any:
        self.made += 1
        return self.memory

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*args: Any, **more: Any) -> Any:
            self.sent += 1
            self.clock.now += self.takes
            if self.errors:
                raise self.errors.pop()
            return call(*args, **more)

        return failing

    def read(self, start: int = 0, length: int = 4) -> bytes | None:
        """What a read finds, as far as it came."""
        self.sent, data = 0, bytearray(length)
        self.pauses.clear()
        count = self.bucket.read("pack", start, [memoryview(data)[:1], memoryview(data)[1:]])
        return None if count is None else bytes(data[:count])


@pytest.fixture
def troubled(monkeypatch: pytest.MonkeyPatch) -> Troubled:
    made = Troubled(monkeypatch)
    assert made.bucket.put("pack", [b"01", b"23456789"])
    assert [each["path"] for each in next(iter(obstore.list(made.memory)))] == ["a/b/pack"]
    return made


def test_a_request_that_fails_for_the_moment_is_sent_twice_more(troubled: Troubled) -> None:
    troubled.errors = [GenericError(BUSY)] * 2
    assert troubled.read() == b"0123"
    assert (troubled.sent, troubled.pauses) == (3, [0.05, 0.1])
    troubled.errors = [GenericError(BUSY)] * 9
    with pytest.raises(TierUnavailable, match="s3://kv: GenericError: 503 Service Unavailable"):
        troubled.read()
    assert troubled.sent == 3


def test_a_request_that_nobody_waits_for_is_not_sent_again(troubled: Troubled) -> None:
    troubled.errors = [GenericError(BUSY)] * 9
    with Waiting(lambda: 0.0), pytest.raises(TierUnavailable):
        troubled.read()
    assert troubled.sent == 1


def test_a_server_that_takes_its_time_is_not_asked_again_behind_the_timeout(
    troubled: Troubled,
) -> None:
    def later(pause: float) -> None:
        troubled.clock.now += 10.5

    troubled.time.sleep = later
    troubled.errors = [GenericError(BUSY)] * 9
    with pytest.raises(TierUnavailable):
        troubled.read()
    assert troubled.sent == 2


def test_one_request_of_ten_may_be_sent_again(troubled: Troubled) -> None:
    budget = RetryBudget()
    assert [budget.spend() for _ in range(17)] == [True] * 16 + [False]
    for _ in range(11):
        assert not budget.spend()
        budget.earn()
    assert budget.spend() and not budget.spend()
    for _ in range(1000):
        budget.earn()
    assert sum(budget.spend() for _ in range(99)) == 16
    while troubled.bucket._budget.spend():
        pass
    troubled.errors = [GenericError(BUSY)]
    with pytest.raises(TierUnavailable):
        troubled.read()
    for _ in range(11):
        assert troubled.read() == b"0123"
    troubled.errors = [GenericError(BUSY)]
    assert troubled.read() == b"0123" and troubled.sent == 2


@pytest.mark.parametrize("error", [GenericError(DENIED), PermissionDeniedError("no")], ids=str)
def test_what_is_refused_is_tried_once_more_with_other_credentials(
    troubled: Troubled, error: Exception
) -> None:
    troubled.errors = [error]
    assert troubled.read() == b"0123"
    assert (troubled.sent, troubled.made, troubled.pauses) == (2, 2, [])
    troubled.errors = [error] * 9
    with pytest.raises(TierRefused):
        troubled.read()
    assert (troubled.sent, troubled.made) == (1, 2), "they were looked for a moment ago"
    troubled.clock.now += 1.5
    with pytest.raises(TierRefused):
        troubled.read()
    assert (troubled.sent, troubled.made) == (2, 3)
    troubled.takes = 2.0
    with pytest.raises(TierRefused):
        troubled.read()
    assert (troubled.sent, troubled.made) == (2, 4), "for as long as it takes, not for ever"

    def replaced() -> Any:
        raise TierUnusable("its file is not there")

    troubled.bucket._make = replaced
    with pytest.raises(TierRefused):
        troubled.read()
    assert troubled.sent == 1
    # Of several threads one looks, and the others use what it found.
    stale = troubled.bucket._store
    troubled.bucket._store = MemoryStore()
    assert troubled.bucket._renewed(stale)


def test_a_server_without_room_is_told_apart_and_not_asked_again(troubled: Troubled) -> None:
    troubled.errors = [GenericError(FULL)]
    with pytest.raises(TierFull, match="507"):
        troubled.bucket.replace("mark", b"0")
    troubled.errors, troubled.sent = [GenericError(FULL)], 0
    with pytest.raises(TierUnavailable, match="507") as raised:
        troubled.bucket.put("other", [b"0"])
    assert not isinstance(raised.value, TierFull) and troubled.sent == 1


def test_what_is_there_is_kept_or_replaced(troubled: Troubled) -> None:
    assert not troubled.bucket.put("pack", [b"new"])
    assert troubled.read(start=4) == b"4567"
    troubled.bucket.replace("pack", b"new")
    assert troubled.read() == b"new"
    troubled.errors = [FileNotFoundError()]
    with pytest.raises(TierUnavailable, match="s3://kv: the bucket is not there"):
        troubled.bucket.put("other", [b"0"])


def test_a_range_behind_the_end_is_nothing_and_a_failure_is_none(troubled: Troubled) -> None:
    assert troubled.read(start=8) == b"89"
    for start in (10, 12):
        assert troubled.read(start=start) == b""
    troubled.errors = [GenericError("status code: 416 Range Not Satisfiable")]
    assert troubled.read(start=12) == b""
    for start, error in ((4, "the connection was reset"), (12, BUSY)):
        troubled.errors = [GenericError(error)] * 3
        with pytest.raises(TierUnavailable):
            troubled.read(start=start)
    troubled.bucket.replace("pack", b"")
    assert troubled.read() == b"", "else one that somebody cut would be a server that fails"
    troubled.bucket.delete(["pack"])
    assert troubled.read() is None and troubled.read(start=4) is None


def test_pieces_fill_views_as_they_come_until_nobody_waits() -> None:
    pieces = [b"012", b"", b"3456", b"789"]

    def filled(*sizes: int) -> tuple[int, list[bytes]]:
        into = [memoryview(bytearray(size)) for size in sizes]
        return obstore_bucket._fill(pieces, into), [bytes(view) for view in into]

    assert filled(1, 4, 5) == (10, [b"0", b"1234", b"56789"])
    assert filled(2, 3) == (10, [b"01", b"234"])
    assert filled(8, 4) == (10, [b"01234567", b"89\0\0"])
    with Waiting(lambda: 0.0):
        assert filled(1, 4, 5) == (3, [b"0", b"12\0\0", bytes(5)])


def test_all_are_deleted_though_one_is_not_there(troubled: Troubled) -> None:
    troubled.bucket.put("other", [b"0"])
    troubled.errors, troubled.sent = [FileNotFoundError()] * 2, 0
    troubled.bucket.delete(["gone", "pack", "other"])
    assert troubled.sent == 4
    assert not [*obstore.list(troubled.memory)]
    troubled.sent = 0
    troubled.bucket.delete([])
    assert not troubled.sent


def test_a_listing_has_the_packs_and_goes_on_behind_an_error(
    troubled: Troubled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obstore_bucket, "LISTED_AT_ONCE", 2)
    names = sorted(name_of(make_key()) for _ in range(7))
    for name in names:
        troubled.bucket.put(name, [b"012"])
    troubled.bucket.put("of/others.txt", [b"0"])
    BucketMarks(troubled.bucket).mark([bytes(NAMESPACE_BYTES)])
    assert len(next(iter(obstore.list(troubled.memory)))) == 10
    assert [*troubled.bucket.names("of")] == ["others.txt"]
    refusals: list[TierRefused] = []
    whole, listed = obstore.list, 0

    def listing(*args: Any, **more: Any) -> Any:
        nonlocal listed
        listed += 1
        for number, page in enumerate(whole(*args, **more)):
            if number == 1 and listed < 3:
                raise GenericError(BUSY)
            yield page

    monkeypatch.setattr(obstore, "list", listing)
    found = [each for page in troubled.bucket.list(refusals.append) for each in page]
    assert [each.name for each in found] == names and {each.size for each in found} == {3}
    assert listed == 3 and not refusals

    def refused(*args: Any, **more: Any) -> Any:
        raise GenericError(DENIED)

    monkeypatch.setattr(obstore, "list", refused)
    assert not [*troubled.bucket.list(refusals.append)] and len(refusals) == 1

    def gone(*args: Any, **more: Any) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr(obstore, "list", gone)
    with pytest.raises(TierUnavailable, match="the bucket is not there"):
        next(troubled.bucket.list(refusals.append))


def test_a_reason_is_the_servers_status_and_code_or_the_first_line() -> None:
    for text, said in (
        (DENIED, "403 Forbidden, InvalidAccessKeyId"),
        ("Client error (code: AccessDenied) of the server", "AccessDenied"),
        ("no route to host\nDebug source: ...", "no route to host"),
    ):
        assert obstore_bucket.reason(GenericError(text)) == f"GenericError: {said}"
    assert obstore_bucket.reason(GenericError("")) == "GenericError"
