"""Marks of images: their content, or this process's own where nobody can tell it."""

from __future__ import annotations

import logging
import threading
import time
import tracemalloc
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spec.chain import LOAD_POLICIES
from tests.support.clock import wait_for
from tests.support.damage import damage_blocks
from tests.support.fake_requests import BLOCKS, FakeRequest
from tests.support.replay import ReplayEngine, answer
from tests.support.replay_chains import MODEL, chain_of, cpu, disk, measured, names, scheduler_of
from tiers.connector.policy.request_state import RequestState, Scheduled
from tiers.connector.policy.request_table import RequestTable
from tiers.connector.scheduler.tier import TierRequest
from tiers.connector.scheduler.tier_stores import new_offers
from tiers.contract.engine_info import EngineInfo
from tiers.contract.marks import MediaMark, MediaMarks, joined
from tiers.contract.stats import CHAIN
from tiers.engine import digesting
from tiers.engine.content_marks import ContentMarks, media_marks, refuse_unmarked_media
from tiers.engine.digesting import Digester

RED, BLUE = torch.full((3, 4), 0.5), torch.full((3, 4), -0.5)


def item(**values: Any) -> Any:
    """What an engine gives a model of one image."""
    return UserDict({name: SimpleNamespace(data=value) for name, value in values.items()})


def seen(name: str, pixels: Any, at: int = 0, length: int = 4) -> Any:
    """An image in a prompt; `pixels`: None, where it does not come to the scheduler."""
    return SimpleNamespace(
        identifier=name,
        modality="image",
        mm_position=SimpleNamespace(offset=at, length=length),
        data=None if pixels is None else item(pixel_values=pixels),
    )


def asked(request_id: str, *images: Any) -> Any:
    return SimpleNamespace(request_id=request_id, mm_features=list(images))


def process(trust: bool = False) -> ContentMarks:
    return ContentMarks(trust, room=100)


def test_one_content_has_one_mark_in_every_process_and_another_has_another() -> None:
    mark = process().of(asked("1", seen("avatar", RED)))
    assert mark.shared
    assert process().of(asked("2", seen("avatar", RED.clone()))).steps == mark.steps
    assert process().of(asked("3", seen("avatar", BLUE))).steps != mark.steps


@pytest.mark.parametrize(
    "other",
    [
        item(pixel_values=RED.bfloat16()),
        item(pixel_values=RED.reshape(4, 3)),
        item(pixel_values=[RED]),
        item(pixel_values=RED, tiles=2),
        item(pixel_values=RED, tiles=torch.tensor(2)),
        item(pixels=RED),
        item(pixel_values=[RED, RED]),
        item(pixel_values=[[RED], [RED]]),
        item(pixel_values=torch.empty(0)),
    ],
)
def test_whatever_a_model_is_given_counts(other: Any) -> None:
    digest = Digester().ask(other).result()
    assert digest is not None and digest != Digester().ask(item(pixel_values=RED)).result()


@pytest.mark.parametrize(
    "unknown",
    [
        None,
        item(address=5, monotonic_id=7, signature=[1, 2]),
        item(pixel_values=RED.to("meta")),
        item(pixel_values=object()),
    ],
)
def test_a_place_in_shared_memory_is_no_content(unknown: Any) -> None:
    assert Digester().ask(unknown).result() is None


@pytest.mark.parametrize(("elsewhere", "pixels"), [(False, None), (True, RED)])
def test_an_image_whose_content_is_not_seen_or_encoded_elsewhere_stays_in_its_process(
    elsewhere: bool, pixels: Any, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = (ContentMarks(False, room=100, elsewhere=elsewhere) for _ in range(2))
    with caplog.at_level(logging.WARNING):
        marks = [here.of(asked(str(n), seen("avatar", pixels))) for n in range(3)]
    (record,) = caplog.records
    assert "trust_client_ids: true" in record.message
    assert marks[0].shared and marks[0].steps == marks[1].steps
    assert there.of(asked("1", seen("avatar", pixels))).steps != marks[0].steps
    assert not here.of(asked("3", seen("avatar", BLUE))).shared


@pytest.mark.parametrize("pixels", [RED, None])
def test_images_that_are_encoded_with_an_adapter_are_known_with_it(pixels: Any) -> None:
    """The engine's names have the adapter's name alone, not where it is from, and so may a uuid."""

    def mark(path: str | None, of: ContentMarks) -> MediaMark:
        request = asked(str(path), seen("sql:avatar", pixels))
        if path is not None:
            request.lora_request = SimpleNamespace(lora_name="sql", lora_path=path)
        return of.of(request)

    for second in ("/v2", None):
        marks = ContentMarks(False, room=100, by_adapter=True)
        assert mark("/v1", marks).shared
        assert not mark(second, marks).shared, "it may be given what the first one's is"
    plain = ContentMarks(False, room=100)
    assert mark("/v1", plain).shared and mark("/v2", plain).shared, "nothing encodes with them"
    trusting = ContentMarks(True, room=100, by_adapter=True)
    assert mark(None, trusting).shared and not mark("/v1", trusting).shared


def test_trusted_names_add_nothing_to_a_key() -> None:
    trusting = process(trust=True)
    assert trusting.of(asked("1", seen("avatar", RED))) == MediaMark()
    assert joined(b"adapter", b"") == b"adapter"


def test_a_name_of_two_contents_is_not_stored_from_then_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The engine's own caches go by names: which of the two do they hold?"""
    marks = process()
    red = marks.of(asked("red", seen("avatar", RED)))
    other = marks.of(asked("other", seen("house", RED)))
    assert red.shared and other.shared
    with caplog.at_level(logging.WARNING):
        blue = marks.of(asked("blue", seen("avatar", BLUE)))
    assert not blue.shared and not red.shared, "what runs now may be computed from either"
    assert other.shared
    again = marks.of(asked("again", seen("avatar", RED)))
    assert not again.shared and again.steps != red.steps
    assert len(caplog.records) == 1


def test_what_runs_under_a_name_of_two_contents_is_offered_to_no_tier() -> None:
    media = process()
    engine = EngineInfo({}, 16, 16, num_blocks=9, media=media)
    table = RequestTable(engine)

    def state(request_id: str, pixels: Any) -> RequestState:
        request = asked(request_id, seen("avatar", pixels))
        request.block_hashes, request.num_tokens = [bytes([n]) * 32 for n in range(4)], 64
        made = table.of(request)
        made.tables = ([1, 2, 3, 4],)
        return made

    red = state("red", RED)
    own = TierRequest(red)
    assert len(new_offers(table, own, Scheduled(red, 0, 32, complete=2)).keys) == 2 and red.stores
    blue = state("blue", BLUE)
    assert not red.stores and not blue.stores
    assert new_offers(table, own, Scheduled(red, 32, 64, complete=4)).keys == ()


def test_a_name_of_content_that_was_not_seen_once_is_not_stored_with_it() -> None:
    marks = process()
    marks.of(asked("1", seen("avatar", None)))
    assert not marks.of(asked("2", seen("avatar", RED))).shared


def test_which_tokens_an_image_fills_counts() -> None:
    """Block hashes show where its tokens begin, and not between which of them others are."""
    images = [seen("a", RED) for _ in range(3)]
    images[1].mm_position.is_embed = torch.tensor([True, True, False, True])
    images[2].mm_position.is_embed = torch.tensor([True, False, True, True])
    marks = [process().of(asked("1", image)).steps[0] for image in images]
    assert len(set(marks)) == 3


@pytest.mark.parametrize("trust", [False, True])
def test_a_video_with_its_sound_is_not_stored(trust: bool) -> None:
    """Where both begin, the engine's block hashes have the video alone: it computes with KV that it
    has of another sound."""
    video, sound = seen("video", RED, at=20, length=9), seen("sound", BLUE, at=20, length=9)
    assert not process(trust).of(asked("1", video, sound)).shared
    assert process(trust).of(asked("2", video, seen("sound", BLUE, at=29))).shared
    growing, marks = asked("3", video), process(trust)
    assert marks.of(growing).shared
    growing.mm_features.append(sound)
    assert not marks.of(growing).shared


def test_a_part_of_a_medium_that_sees_all_of_itself_is_cut_before_it() -> None:
    request = asked("1", seen("a", RED, at=20, length=9), seen("b", BLUE, at=40, length=9))
    ends = [20, 21, 28, 29, 40, 48, 49, 50]
    marks = ContentMarks(False, room=100, sees_all=True)
    assert [marks.cut(request, end) for end in ends] == [20, 20, 20, 29, 40, 40, 49, 50]
    assert [process().cut(request, end) for end in ends] == ends
    assert marks.cut(SimpleNamespace(request_id="text"), 21) == 21
    assert marks.all_or_nothing(request) and not process().all_or_nothing(request)
    assert not marks.all_or_nothing(SimpleNamespace(request_id="text"))


@pytest.mark.parametrize("trust", [False, True])
def test_nothing_is_stored_or_loaded_of_an_image_in_doubt(trust: bool) -> None:
    """The engine's own cache may have it, which another request then computes with."""
    media = process(trust)
    table, state, request = session(media, seen("photo", RED, at=2))
    assert table.loadable(state) == 4
    media.doubt(request)
    assert not state.stores and table.loadable(state) == 0
    other = asked("2", seen("photo", RED, at=2))
    other.block_hashes = []
    assert not table.of(other).stores
    assert media.of(asked("3", seen("another", RED, at=2))).shared


def test_so_many_names_are_remembered() -> None:
    marks = ContentMarks(False, room=2)
    for name in "abc":
        marks.of(asked(name, seen(name, RED)))
    assert not marks.of(asked("1", seen("b", BLUE))).shared
    assert marks.of(asked("2", seen("a", BLUE))).shared, "the engine has long forgotten it, too"
    for name in "defgh":
        late = asked(name, seen(name, RED))
        assert marks.give_up(late, late=False)
        marks.forget(name)
    assert not marks.of(asked("3", seen("h", RED))).shared
    assert marks.of(asked("4", seen("d", RED))).shared, "those in doubt are no more"


def test_a_client_does_not_choose_how_much_memory_its_names_take() -> None:
    marks = process()
    tracemalloc.start()
    try:
        for number in range(20):
            marks.of(asked("1", seen(f"{number}\ud800".ljust(1 << 20), RED)))
            marks.forget("1")
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1 << 20


def test_blocks_before_an_image_are_those_of_their_tokens() -> None:
    mark = process().of(asked("1", seen("a", RED, at=20), seen("b", BLUE, at=40)))
    (_, first), (_, both) = mark.steps
    assert list(mark.spans(range(5), 16)) == [
        (range(1), b""),
        (range(1, 2), first),
        (range(2, 5), both),
    ]
    assert list(mark.spans(range(3, 4), 16)) == [(range(3, 4), both)]
    assert list(mark.spans(range(1), 16)) == [(range(1), b"")]
    alone = process().of(asked("1", seen("a", RED, at=20)))
    assert alone.steps[0] == mark.steps[0], "a conversation goes on with another image"


def session(media: ContentMarks, *images: Any) -> tuple[RequestTable, RequestState, Any]:
    """A request with these images and four blocks, that goes on after its answer."""
    table = RequestTable(EngineInfo({}, 16, 16, num_blocks=9, media=media))
    request = asked("1", *images)
    request.block_hashes, request.num_tokens = [bytes([n]) * 32 for n in range(2)], 32
    state = table.of(request)
    assert len(table.keys(state)) == 2 and state.stores
    request.block_hashes = [bytes([n]) * 32 for n in range(4)]
    return table, state, request


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("begins", [[], [seen("photo", RED, at=2)]])
def test_what_a_request_goes_on_with_decides_whether_it_is_stored(
    trust: bool, begins: list[Any]
) -> None:
    table, state, request = session(process(trust), *begins)
    places = {"at": 40, "length": 9}
    request.mm_features += [seen("video", RED, **places), seen("sound", BLUE, **places)]
    table.engine.media.of(request)
    table.keys(state)
    assert not state.stores


def test_what_a_request_goes_on_with_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    table, state, request = session(process())
    monkeypatch.setattr(ContentMarks, "ready", lambda *_: False)
    request.mm_features.append(seen("video", RED, at=40))
    with monkeypatch.context() as patch:
        patch.setattr(ContentMarks, "of", lambda *_: pytest.fail("it would wait"))
        assert len(table.keys(state)) == 2 and table.loadable(state) == 2
    monkeypatch.setattr(ContentMarks, "ready", lambda *_: True)
    assert len(table.keys(state)) == 4


def test_images_that_are_added_while_a_request_runs_count() -> None:
    marks = process()
    request = asked("1", seen("a", RED))
    before = list(marks.of(request).steps)
    request.mm_features.append(seen("b", BLUE, at=40))
    assert marks.of(request).steps[:1] == before
    both = asked("2", seen("a", RED), seen("b", BLUE, at=40))
    assert marks.of(request).steps == process().of(both).steps


def test_a_request_waits_for_nothing_but_its_own_images() -> None:
    marks = process()
    request = asked("1", seen("a", RED))
    assert marks.ready(SimpleNamespace(request_id="2"))
    marks.expect(request)
    marks.of(request)
    assert marks.ready(request)
    marks.forget("1")
    marks.forget("1")
    assert not marks._marks and not marks._names and not marks._digesting
    assert not marks._digester._jobs


def test_what_an_image_was_is_digested_once_while_the_engine_keeps_it() -> None:
    marks = process()
    image = seen("a", RED)
    steps = marks.of(asked("1", image)).steps
    assert marks.of(asked("2", image)).steps == steps
    assert len(marks._digester._known) == 1
    image.data = None
    wait_for(lambda: not marks._digester._known)  # nor is an image kept


class Late(UserDict[str, Any]):
    """What is digested once it `begins`."""

    def __init__(self, values: Any) -> None:
        super().__init__(values)
        self.begins = threading.Event()

    def items(self) -> Any:
        self.begins.wait(20)
        return super().items()


def test_a_digest_is_kept_although_nobody_wants_it_once_it_is_there() -> None:
    image, digester = Late(item(pixel_values=RED)), Digester()
    digest = digester.ask(image)
    digest.add_done_callback(lambda _: digester.drop(image, digest))
    image.begins.set()
    assert digest.result(20) is not None
    assert len(digester._known) == 1


def test_one_that_is_asked_for_as_another_answer_comes_is_digested_once() -> None:
    image, digester = Late(item(pixel_values=RED)), Digester()
    first = digester.ask(image)

    class Known(dict[int, Any]):
        def get(self, key: int, default: Any = None) -> Any:
            found = super().get(key, default)
            image.begins.set()
            wait([first], 0.5)
            return found

    digester._known = Known()
    second = digester.ask(image)
    assert second is first, "it is not digested twice"
    digester.drop(image, first)
    assert second.result(20) is not None


def test_an_answer_that_is_dropped_takes_no_later_one_along() -> None:
    """Of what can't be watched a digest is not noted, so it is digested again."""

    class Unwatched:
        __slots__ = ("_data", "gate")

        def __init__(self, data: Any) -> None:
            self._data, self.gate = data, threading.Event()

        def items(self) -> Any:
            self.gate.wait(20)
            return self._data.items()

    image, digester = Unwatched(item(pixel_values=RED)), Digester()
    image.gate.set()
    first = digester.ask(image)
    assert first.result(20) is not None and not digester._known
    image.gate.clear()
    second = digester.ask(image)
    digester.drop(image, first)
    image.gate.set()
    assert second.result(20) == first.result()


@pytest.mark.parametrize("load", LOAD_POLICIES)
def test_others_run_while_a_requests_images_are_digested(
    engine: Callable[..., ReplayEngine], monkeypatch: pytest.MonkeyPatch, load: str
) -> None:
    made = engine(chain_of(cpu(400), load_policy=load), prefix_caching=False)
    prompt = list(range(30))
    made.add(prompt, 2)
    made.run()
    made.settle()
    digesting: set[str] = set()
    monkeypatch.setattr(MediaMarks, "ready", lambda _, request: request.request_id not in digesting)
    with_images = made.add(prompt, 2)
    digesting.add(with_images.request_id)
    other = made.add([7, *prompt], 2)
    for _ in range(50):
        made.step()
    assert len(other.output) == 2 and not with_images.has_run
    digesting.clear()
    made.run()
    assert with_images.output == answer(MODEL, prompt, 2)


IMAGE = range(20, 60)


def cut_before_image(_: MediaMarks, request: Any, tokens: int) -> int:
    return IMAGE.start if IMAGE.start < tokens < IMAGE.stop else tokens


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
@pytest.mark.parametrize("load", LOAD_POLICIES)
def test_no_load_ends_within_an_image_that_sees_all_of_itself(
    engine: Callable[..., ReplayEngine],
    monkeypatch: pytest.MonkeyPatch,
    load: str,
    windows: tuple[int | None, ...],
) -> None:
    model = replace(MODEL, windows=windows)
    made = engine(chain_of(cpu(400), load_policy=load), model=model, prefix_caching=False)
    prompt = list(range(80))
    made.generate(prompt[:45], 1)
    made.settle()
    monkeypatch.setattr(MediaMarks, "cut", cut_before_image)
    request = made.generate(prompt, 2)
    assert request.output == answer(model, prompt, 2)
    assert measured(made, "loaded_tokens", "cpu") == IMAGE.start
    made.settle()
    made.generate(prompt, 2)
    assert measured(made, "loaded_tokens", "cpu") > IMAGE.start + IMAGE.stop


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("load", LOAD_POLICIES)
def test_nothing_is_used_of_a_load_that_fails_within_an_image_that_sees_all_of_itself(
    engine: Callable[..., ReplayEngine],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    load: str,
    is_whole: bool,
) -> None:
    """The engine would go on behind the last block that came, and compute the rest of it apart."""
    made = engine(chain_of(disk(tmp_path), load_policy=load), prefix_caching=False)
    prompt = list(range(80))
    lost = names(made, made.generate(prompt, 1).block_hashes[7:])
    made.settle()
    assert damage_blocks(tmp_path, lost.__contains__) == len(lost)
    monkeypatch.setattr(MediaMarks, "all_or_nothing", lambda *_: is_whole)
    request, recompute, left = made.add(prompt, 2), made.scheduler._recompute, list[int]()

    def noting(*reported: Any) -> None:
        recompute(*reported)
        left.append(request.num_computed_tokens)

    monkeypatch.setattr(made.scheduler, "_recompute", noting)
    made.run()
    assert left == [0 if is_whole else 28]
    assert measured(made, "loaded_tokens", "disk") == left[0]
    assert request.output == answer(MODEL, prompt, 2)


@pytest.mark.parametrize("step", [24, 60, 64])
def test_nothing_is_stored_once_a_step_ends_within_an_image_that_sees_all_of_itself(
    engine: Callable[..., ReplayEngine], monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr(MediaMarks, "cut", cut_before_image)
    made = engine(chain_of(cpu(400)), prefix_caching=False, batch_tokens=step)
    made.generate(list(range(80)), 2)
    made.settle()
    assert (measured(made, "stored_blocks", "cpu") > 0) is (step >= IMAGE.stop)


class NeverKnown:
    """Facts that keep a tier from opening."""

    def known(self, seconds: float = 0.0) -> None:
        return None


def test_the_engine_never_waits_for_digests(
    engine: Callable[..., ReplayEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(chain_of(cpu(400)), prefix_caching=False)
    digesting = True

    def of(_: MediaMarks, request: Any) -> MediaMark:
        assert not digesting, "every request waits"
        return MediaMark()

    monkeypatch.setattr(MediaMarks, "ready", lambda *_: not digesting)
    monkeypatch.setattr(MediaMarks, "of", of)
    params = {"kvtiers": {"max_load_tokens": 0}}
    request = made.add(range(30), 2, kv_transfer_params=params)
    for _ in range(20):
        made.step()
    assert not request.has_run
    digesting = False
    made.run()
    assert request.output == answer(MODEL, list(range(30)), 2)


@pytest.mark.parametrize("why", ["no tier is open yet", "no tier works", "it takes too long"])
def test_a_request_goes_on_without_tiers_where_its_images_are_not_waited_for(
    engine: Callable[..., ReplayEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str
) -> None:
    """Nothing is stored or loaded under a mark that is not known."""
    late = why == "no tier is open yet"
    chain = chain_of(disk(tmp_path) if late else cpu(400), max_wait="100ms")
    made = engine(chain, prefix_caching=False, late_facts=NeverKnown() if late else None)
    given_up: list[bool] = []

    def give_up(*_: object, late: bool) -> bool:
        given_up.append(late)
        return True

    def of(_: MediaMarks, request: Any) -> MediaMark:
        assert given_up, "every request waits"
        return MediaMark([(0, b"its own")], shared=False)

    monkeypatch.setattr(MediaMarks, "ready", lambda *_: bool(given_up))
    monkeypatch.setattr(MediaMarks, "give_up", give_up)
    monkeypatch.setattr(MediaMarks, "of", of)
    if why == "no tier works":
        scheduler_of(made)._tier.ended()
    request = made.add(range(30), 2)
    made.step()
    assert request.has_run is (why != "it takes too long")
    end = time.monotonic() + 60
    while len(request.output) < 2:
        made.step()
        assert time.monotonic() < end
    assert given_up == [why == "it takes too long"]
    made.settle()
    assert measured(made, "media_timeouts", CHAIN) == sum(given_up)
    assert measured(made, "stored_blocks") == 0


@pytest.mark.usefixtures("slow")
def test_nor_where_the_engine_begins_it_before_our_tiers_were_asked() -> None:
    """As it does where another connector loads all of it: nothing on its thread waits."""
    table = RequestTable(EngineInfo({}, 16, 16, num_blocks=9, media=process()))
    request: Any = FakeRequest("r", 40, [b"1", b"2"])
    request.mm_features = [seen("film", torch.rand(500))]
    assert not table.allocated(request, BLOCKS).stores
    assert table.take_measures()[CHAIN]["media_timeouts"] == 1
    table.forget(request)


def test_marks_are_forgotten_when_the_last_tier_has_heard_of_the_end(
    engine: Callable[..., ReplayEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forgotten: list[str] = []

    def of(_: MediaMarks, request: Any) -> MediaMark:
        assert request.request_id not in forgotten, "it is digested anew, for the second tier"
        return MediaMark()

    monkeypatch.setattr(MediaMarks, "of", of)
    monkeypatch.setattr(MediaMarks, "forget", lambda _, request_id: forgotten.append(request_id))
    made = engine(chain_of(cpu(400), disk(tmp_path)), prefix_caching=False)
    for tokens in range(1, 2 * MODEL.block_tokens):
        made.generate(range(30), tokens)
    assert len(set(forgotten)) == 2 * MODEL.block_tokens - 1


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of a byte in ten milliseconds."""
    pieces = digesting._pieces

    def slowly(value: Any) -> Iterator[Any]:
        for piece in pieces(value):
            time.sleep(0.01 * isinstance(piece, memoryview))
            yield piece

    monkeypatch.setattr(digesting, "PIECE", 1)
    monkeypatch.setattr(digesting, "_pieces", slowly)


@pytest.mark.usefixtures("slow")
def test_an_image_does_not_wait_behind_videos() -> None:
    """Nor are videos digested for whom nobody waits any more."""
    marks = process()
    videos = [asked(str(n), seen(str(n), torch.rand(5000))) for n in range(24)]
    for video in videos:
        assert not marks.ready(video)
    image = asked("image", seen("image", torch.rand(2)))
    wait_for(lambda: marks.ready(image))
    assert marks.of(image).shared
    assert not any(map(marks.ready, videos)), "hours of work"
    begun = [job for job in marks._digester._jobs.values() if job.left < 20_000]
    assert len(begun) <= digesting.THREADS, "turns for all would make each the later"
    item = weakref.ref(videos[0].mm_features[0].data)
    for video in videos:
        marks.forget(video.request_id)
        video.mm_features.clear()
    assert not marks._digester._jobs and not marks._digesting
    wait_for(lambda: item() is None)


@pytest.mark.usefixtures("slow")
def test_what_a_name_stood_for_is_open_while_its_digest_is_missing() -> None:
    """The engine's caches have what was computed from it under that name."""
    marks = process()
    first, video = (
        asked("1", seen("avatar", torch.rand(4))),
        asked("2", seen("film", torch.rand(5000)), seen("clip", torch.rand(5000), at=8)),
    )
    gone = asked("6", seen("house", torch.rand(4)))
    for late in (first, video, gone):
        assert not marks.ready(late)
        assert marks.give_up(late) and not marks.give_up(late)
        assert marks.ready(late) and not marks.of(late).shared and marks.of(late).steps
    for late in (first, gone):
        marks._given_up[late.request_id][0].content.result()
    same = asked("3", *first.mm_features)
    assert not marks.of(same).shared, "the first may have another image, for all that is known yet"
    marks.forget("1")
    marks.forget("3")
    assert marks.of(asked("4", *first.mm_features)).shared
    marks.forget("2")
    assert not marks.of(asked("5", seen("film", torch.rand(2)))).shared, "it was never digested"
    marks.forget("6")
    assert not marks.of(asked("7", seen("house", torch.rand(4)))).shared, "it was another image"
    assert not marks._given_up


@pytest.mark.usefixtures("slow")
def test_an_image_whose_digest_was_late_is_known_with_its_adapter() -> None:
    marks, image = ContentMarks(False, room=100, by_adapter=True), seen("avatar", torch.rand(4))
    late, again = (asked(name, image) for name in ("1", "2"))
    late.lora_request = again.lora_request = SimpleNamespace(lora_name="sql", lora_path="/v1")
    assert not marks.ready(late) and marks.give_up(late)
    marks._given_up["1"][0].content.result()
    marks.forget("1")
    assert marks.of(again).shared


def test_where_nothing_is_ever_stored_nothing_is_digested() -> None:
    marks = process()
    request = asked("1", seen("a", RED))
    marks.give_up(request, late=False)
    assert marks.ready(request) and not marks._digester._jobs and not marks._digester._known


def test_an_item_of_another_kind_than_known_ends_no_engine() -> None:
    image = seen("a", RED)
    image.data = dict(image.data)
    marks = process()
    assert marks.of(asked("1", image)).steps == process().of(asked("2", seen("a", RED))).steps
    assert not marks._digester._known


def configured(caching: bool = True, cache_gb: float = 4, media: bool = True) -> Any:
    multimodal = SimpleNamespace(
        mm_processor_cache_gb=cache_gb,
        language_model_only=False,
        get_limit_per_prompt=lambda modality: 999,
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="org/model",
            multimodal_config=multimodal if media else None,
            is_mm_prefix_lm=False,
            hf_config=SimpleNamespace(model_type="blip-2"),
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
        ec_transfer_config=None,
        lora_config=None,
    )


@pytest.mark.parametrize("more", [{}, {"image_embeds": None}])
def test_of_sizes_alone_nobody_knows_what_an_image_is(more: dict[str, Any]) -> None:
    """vLLM takes such, whose KV another node is to send."""
    image = seen("img-1", RED)
    image.data = item(image_grid_thw=torch.tensor([1, 2, 2]), **more)
    here, there = process(), process()
    marks = [one.of(asked("1", image)) for one in (here, there)]
    assert marks[0].steps != marks[1].steps and all(mark.shared for mark in marks)
    assert here.of(asked("2", image)).steps == marks[0].steps
    image.data = item(image_grid_thw=torch.tensor([1, 2, 2]), image_embeds=RED)
    assert process().of(asked("3", image)).steps == process().of(asked("3", image)).steps


def test_a_counter_is_never_trusted() -> None:
    image = asked("1", seen("renderer0-mm-1-image-0", RED))
    assert media_marks(configured(), 100, True).of(image).steps == []
    assert media_marks(configured(caching=False), 100, True).of(image).steps == []
    assert media_marks(configured(cache_gb=0), 100, True).of(image).steps == []
    assert media_marks(configured(False, 0), 100, True).of(image).steps != []
    assert media_marks(configured(), 100, False).of(image).steps != [], "names are not trusted"
    assert media_marks(configured(media=False), 100, False).of(image).steps == []
    others = configured()
    others.ec_transfer_config = SimpleNamespace(is_ec_consumer=True)
    marks = [media_marks(others, 100, False).of(image).steps for _ in range(2)]
    assert marks[0] != marks[1], "as other nodes' encoders know it"
    whole, part = configured(), asked("2", seen("a", RED, at=20, length=9))
    assert media_marks(whole, 100, True).cut(part, 25) == 25
    whole.model_config.is_mm_prefix_lm = True
    assert media_marks(whole, 100, True).cut(part, 25) == 20
    few, many = (media_marks(configured(), tokens, False) for tokens in (100, 1 << 20))
    assert isinstance(few, ContentMarks) and isinstance(many, ContentMarks)
    assert (few._room, many._room) == (1 << 16, 1 << 18)


def test_a_hosted_chain_refuses_what_it_can_not_tell_apart() -> None:
    refuse_unmarked_media(configured(media=False), False)
    refuse_unmarked_media(configured(), True)
    with pytest.raises(ValueError, match="trust_client_ids: true"):
        refuse_unmarked_media(configured(), False)
    with pytest.raises(ValueError, match="--enable-prefix-caching"):
        refuse_unmarked_media(configured(False, 0), True)
    for name, value in (
        ("is_mm_prefix_lm", True),
        ("hf_config", SimpleNamespace(model_type="qwen3_omni_moe")),
    ):
        parts = configured()
        setattr(parts.model_config, name, value)
        with pytest.raises(ValueError, match=r"org/model .*--language-model-only"):
            refuse_unmarked_media(parts, True)
        parts.model_config.multimodal_config.language_model_only = True
        refuse_unmarked_media(parts, True)
    parts = configured()
    parts.model_config.hf_config.model_type = "qwen3_omni_moe"
    parts.model_config.multimodal_config.get_limit_per_prompt = {"video": 9, "audio": 0}.get
    refuse_unmarked_media(parts, True)
    mixed = configured(media=False)
    mixed.model_config.enable_prompt_embeds = True
    with pytest.raises(ValueError, match="--enable-prompt-embeds"):
        refuse_unmarked_media(mixed, False)
