"""Words by their addresses: what they hold now, of memory that nobody keeps for them."""

from __future__ import annotations

import pytest
import torch

from tiers.gpu.words import WORD, Words

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
