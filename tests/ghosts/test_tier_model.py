"""Sampled keys estimate what an exact cache of whole prefixes has."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

import pytest

from tiers.ghosts.ghosts import PARTS, SURE, HotPrefix, Sampled, SampledStack, TierModel


def conversations(requests: int, seed: int = 0) -> list[list[int]]:
    """Prompts that continue one of many others, the younger ones more often."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for _ in range(requests):
        again = prompts[-min(len(prompts), int(rng.expovariate(1 / 150)) + 1)] if prompts else []
        keep = again if rng.random() < 0.7 else []
        prompts.append([*keep, *(rng.getrandbits(64) for _ in range(rng.randrange(1, 12)))][:60])
    return prompts


def exact(prompts: Sequence[Sequence[int]], capacity: int, threshold: int = 1) -> tuple[int, int]:
    """Hits and stores of an LRU cache of whole prefixes."""
    held: OrderedDict[int, None] = OrderedDict()
    seen: dict[int, int] = {}
    hits = stores = 0
    for prompt in prompts:
        for block in prompt:
            if block not in held:
                break
            hits += 1
        for block in reversed(prompt):
            if block not in held:
                seen[block] = seen.get(block, 0) + 1
                if seen[block] < threshold:
                    continue
                stores += 1
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity:
            held.popitem(last=False)
    return hits, stores


def modelled(prompts: Sequence[Sequence[int]], model: TierModel) -> None:
    for prompt in prompts:
        ours = [key for key in prompt if key < model.rate * 2**64]
        model.request(Sampled(ours, ours, 0))


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_a_sample_of_everything_is_exact(threshold: int) -> None:
    prompts = conversations(1500)
    asked = sum(map(len, prompts))
    for capacity in (50, 300, 3000):  # alone, since a larger one would keep more than it has
        model = TierModel([capacity], threshold, 20_000 if threshold == 1 else capacity)
        modelled(prompts, model)
        (found,) = model.estimates(asked, 0)
        hits, stores = exact(prompts, capacity, threshold)
        if threshold == 1:
            assert found.hits * asked == pytest.approx(hits)
            assert found.stores * asked == pytest.approx(stores)
            assert found.error == 0
        elif capacity == 3000:
            assert found.hits * asked == pytest.approx(hits)


def test_a_tenth_tells_its_error() -> None:
    prompts = conversations(6000)
    asked = sum(map(len, prompts))
    capacities = [1000, 5000]
    model = TierModel(capacities, 1, 500)
    assert model.rate == 0.1
    modelled(prompts, model)
    for capacity, found in zip(capacities, model.estimates(asked, 0), strict=True):
        hits, stores = exact(prompts, capacity)
        assert 0 < found.error < 0.1
        assert abs(found.hits - hits / asked) < 2 * found.error
        assert abs(found.stores - stores / asked) < 0.1


def test_an_error_is_no_more_than_all() -> None:
    """Of little traffic `kvtiers status` showed 0.0% +- 354.8%."""
    model, prompts = TierModel([1000], 1, 500), [[1 << 40], [1 << 62, 1 << 63]]
    modelled(prompts, model)
    (found,) = model.estimates(3, 0)
    assert (found.hits, found.error) == (0, 1)


def test_a_hit_counts_below_the_first_miss_only_and_before_any_touch() -> None:
    model = TierModel([100], 1, 100)
    model.request(Sampled([1, 2, 3], [1, 2, 3], 0))
    model.request(Sampled([1, 9, 3], [1, 9, 3], 0))
    assert model.estimates(6, 0)[0].hits == pytest.approx(1 / 6)
    small = TierModel([2], 1, 100)
    for _ in range(2):  # the first two stay, the tail goes
        small.request(Sampled([1, 2, 3], [1, 2, 3], 0))
    assert small.estimates(6, 0)[0].hits == pytest.approx(2 / 6)


def test_old_counts_weigh_less() -> None:
    model = TierModel([10], 1, 10)
    model.request(Sampled([1], [1], 0))
    model.decay(0.25)
    model.request(Sampled([1], [1], 0))
    (found,) = model.estimates(1.25, 0)
    assert found.hits == pytest.approx(0.8) and found.stores == pytest.approx(0.2)


def test_the_stack_counts_as_a_list_does() -> None:
    rng = random.Random(3)
    stack, plain = SampledStack(40), list[int]()
    for _ in range(5000):
        key = rng.randrange(60)
        place = plain.index(key) if key in plain else None
        assert stack.younger(key) == place
        stack.touch(key)
        plain = [key, *(one for one in plain if one != key)][:40]
        assert len(stack._moments) == len(plain) and len(stack._keys) <= 2 * 40


def test_the_hot_prefix_is_what_most_prompts_share() -> None:
    hot = HotPrefix()
    system = [bytes([n]) for n in range(20)]
    rng = random.Random(1)
    found = []
    for number in range(200):
        own = [rng.randbytes(8) for _ in range(rng.randrange(1, 30))]
        found.append(hot.shared_by(own if number % 4 == 3 else system + own))
    later = found[100:]
    assert {*later[0::4], *later[1::4], *later[2::4]} == {20} and {*later[3::4]} == {0}
    assert hot.shared_by([]) == 0
    assert hot.shared_by(system[:7]) == 7
    assert hot.shared_by(system) == 7, "some share no more"
    assert PARTS == 8


def test_copies_of_a_prompt_are_not_hot() -> None:
    """No half of the prompts shares a block, however many copies of one follow each other."""
    hot = HotPrefix()
    rng = random.Random(2)
    for _ in range(300):
        prompt = [rng.randbytes(8) for _ in range(20)]
        assert {hot.shared_by(prompt) for _ in range(8)} == {0}


def test_galloping_finds_every_end() -> None:
    for length in range(1, 40):
        for same in range(1, length + 1):
            hot = HotPrefix()
            blocks = [bytes([n]) for n in range(length)]
            for _ in range(SURE + 1):
                hot.shared_by(blocks)
            other = [*blocks[:same], *(b"x%d" % n for n in range(length - same))]
            assert hot.shared_by(other) == same, (length, same)
