"""Words by their addresses: what they hold now, of memory that nobody keeps for them."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.gpu.cuda_model import Model, Site
from tiers.engine import model_weights as module
from tiers.engine.model_weights import WORD, Words

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="none")),
]


@pytest.mark.parametrize("device", DEVICES)
def test_words_are_read_where_they_are(device: str) -> None:
    """Of allocations apart from each other, in the order asked for, as they are at that moment."""
    made = [torch.arange(100 * at, 100 * at + 50, dtype=WORD, device=device) for at in range(3)]
    starts = [one.data_ptr() for one in made]
    first = min(starts)
    words = Words(made[0].device, first, max(starts) + made[0].nbytes)
    places = [(start - first) // WORD.itemsize + 7 for start in starts]
    numbers = torch.tensor([places[2], places[0], places[1]])
    numbers = numbers.pin_memory() if device == "cuda" else numbers

    def read() -> list[int]:
        reading = words.read(numbers)
        found = torch.frombuffer(bytearray(reading.words()), dtype=WORD).tolist()
        assert reading.ready()
        return list(found)

    assert read() == [207, 7, 107]
    made[0][7] = -1
    assert read() == [207, -1, 107]


def test_words_of_an_xpu_come_to_the_host() -> None:
    """By tensors without content, of which PyTorch knows where they are."""
    weights = torch.arange(50, dtype=WORD)
    words = Words(weights.device, weights.data_ptr(), weights.data_ptr() + weights.nbytes)
    numbers = torch.tensor([7, 3])
    with FakeTensorMode(allow_non_fake_inputs=True):
        words._memory = torch.empty(50, dtype=WORD, device="xpu")
        words._device = words._memory.device
        try:
            found = words.read(numbers)._words
        except NotImplementedError:
            pytest.skip("this PyTorch can't fake an XPU")
    assert (found.device.type, found.shape, found.dtype) == ("cpu", (2,), WORD)


def read_while_they_change(
    patch: pytest.MonkeyPatch, eager: bool, taken_away: Site | None = None
) -> tuple[bool, list[int]]:
    """Read a word on a modelled device, which the engine has queued to change to 5, and then to 6:
    whether it was there at once, and what it was. The stream beside the engine's runs as early as
    events allow, or as late."""
    weights = torch.zeros(16, dtype=WORD)
    words = Words(weights.device, weights.data_ptr(), weights.data_ptr() + weights.nbytes)
    with patch.context() as patched:
        model = Model(["beside"], {"beside"} if eager else ())
        model.install(patched)
        words._beside = torch.cuda.Stream(weights.device)
        model.taken_away = taken_away
        model.compute.put(lambda: weights.fill_(5))
        reading = words.read(torch.tensor([3]))
        was_ready = reading.ready()
        model.compute.put(lambda: weights.fill_(6))
        found = torch.frombuffer(bytearray(reading.words()), dtype=WORD).tolist()
        assert model.times_taken_away == (taken_away is not None)
    return was_ready, found


@pytest.mark.parametrize("eager", [True, False])
def test_a_devices_words_are_those_behind_what_it_was_given(
    monkeypatch: pytest.MonkeyPatch, eager: bool
) -> None:
    assert read_while_they_change(monkeypatch, eager) == (False, [5])


@pytest.mark.parametrize("wait", [".wait_event(", ".synchronize("])
def test_each_wait_is_needed(monkeypatch: pytest.MonkeyPatch, wait: str) -> None:
    source = inspect.getsource(module).splitlines()
    (line,) = (number for number, text in enumerate(source, 1) if wait in text)
    site = "tiers/engine/model_weights.py", line
    found = [read_while_they_change(monkeypatch, eager, site) for eager in (True, False)]
    assert found != [(False, [5])] * 2
