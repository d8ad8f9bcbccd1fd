"""An engine that sleeps: its paged KV goes away and comes back with other bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spec.chain import ChainSpec
from tests.support.replay import ReplayEngine, answer
from tests.support.replay.worker import LocalRank
from tests.support.replay_chains import MODEL, chain_of, close, cpu, disk, measured
from tests.support.slow_store import LONG, SlowSpec, TroubledStore, ask
from tiers.contract.stats import CHAIN
from tiers.gpu.copier import CpuCopier
from tiers.lab.replay.requests import Status

MakeEngine = Callable[..., ReplayEngine]
PATIENCE: Any = "20s"
GONE = -7
"""What lies in memory that the engine has taken away, and in that which it is given anew."""


class LateGathers(CpuCopier):
    """Copies out of the paged KV that take longer than the step."""

    def _gather(self, *args: Any) -> None:
        time.sleep(0.05)
        super()._gather(*args)


def paged(made: ReplayEngine) -> list[torch.Tensor]:
    """The paged KV of all layers of the last rank."""
    *_, worker = made.workers
    assert isinstance(worker, LocalRank)
    return list(worker.kv.values())


def sleep(made: ReplayEngine) -> None:
    """Take the paged KV of the last rank away, past the engine."""
    *_, worker = made.workers
    assert isinstance(worker, LocalRank)
    worker.connector.unregister_kv_caches()
    worker.connector.unregister_kv_caches()
    for layer in paged(made):
        layer.fill_(GONE)


def reset(made: ReplayEngine) -> None:
    """Empty the engine's own cache, which the connector hears."""
    made.scheduler.pool.forget_all()
    assert made.connector is not None
    made.connector._requests.cache_emptied()


def wake(made: ReplayEngine) -> None:
    """Give the memory back; the engine collects the handshakes again."""
    *_, worker = made.workers
    assert isinstance(worker, LocalRank)
    worker.connector.restore_kv_caches()
    assert made.connector is not None
    made.connector.set_xfer_handshake_metadata({worker._rank: worker.handshake()})


def test_blocks_on_their_way_out_are_stored_as_they_were(
    engine: MakeEngine, tmp_path: Path
) -> None:
    chain = chain_of(cpu(), disk(tmp_path))
    made = engine(chain, open_copier=LateGathers)
    prompt = list(range(40))
    made.add(prompt, 1)
    while made.scheduler.requests:
        made.step()
    reset(made)
    sleep(made)
    wake(made)
    made.settle()
    for _ in range(2):
        assert made.generate(prompt, 6).output == answer(MODEL, prompt, 6)
    assert measured(made, "loaded_tokens", "cpu") > 0


def test_nothing_arrives_while_the_engine_sleeps(engine: MakeEngine, store: TroubledStore) -> None:
    tier = SlowSpec.model_validate({"type": "slow", "deadline": "30s"})
    # It is asked in the background: a busy machine must not open the breaker of its index.
    store.slow.indexed = False
    chain = ChainSpec(version=1, load_when="always", tiers=(tier,), max_wait=PATIENCE)
    made = engine(chain, num_blocks=120)
    ask(made)
    made.settle()
    made.scheduler.pool.forget_all()
    store.pace.hang("get")
    request = made.add(LONG, 4)
    while request.status is not Status.LOADING:
        made.step()
    sleep(made)
    store.pace.resume()
    time.sleep(0.2)
    assert all(bool((layer == GONE).all()) for layer in paged(made))
    wake(made)
    made.run()
    assert request.output == answer(MODEL, LONG, 4)
    assert measured(made, "load_failures") == 100


PROMPT, MORE = list(range(50)), list(range(100, 150))


@pytest.mark.fault
@pytest.mark.parametrize("on_reset", ["forget", "keep"])
@pytest.mark.parametrize(("ranks", "in_flight"), [(1, 1), (1, 2), (2, 1)])
def test_what_is_computed_behind_kv_that_is_gone_is_never_stored(
    engine: MakeEngine, tmp_path: Path, ranks: int, in_flight: int, on_reset: str
) -> None:
    """The workers sleep past the engine, which serves what it had. Of two one alone is asked."""
    chain = chain_of(cpu(), disk(tmp_path), on_reset=on_reset)
    made = engine(chain, world_size=ranks, steps_in_flight=in_flight)
    made.generate(PROMPT, 3)
    made.settle()
    sleep(made)
    wake(made)
    for prompt in ([*PROMPT, *MORE], [*PROMPT, *MORE, *PROMPT]):
        assert made.generate(prompt, 3).output != answer(MODEL, prompt, 3, ranks), "as without us"
        made.settle()
        sibling = engine(chain, prefix_caching=False, world_size=ranks)
        request = sibling.generate(prompt, 3)
        assert request.output == answer(MODEL, prompt, 3, ranks)
        assert request.loaded_tokens, "what was stored before is right"
        close(sibling)
    reset(made)
    for loaded in (0, 100):
        assert made.generate([*MORE, *MORE], 3).loaded_tokens == loaded, "it stores again"
        made.settle()
        reset(made)


@pytest.mark.parametrize("first", ["the reset", "the sleep"])
def test_an_engine_that_resets_as_it_sleeps_goes_on_with_its_tiers(
    engine: MakeEngine, tmp_path: Path, first: str
) -> None:
    """Where weights never change; a step that computes nothing may come in between."""
    made = engine(chain_of(disk(tmp_path), on_reset="keep"))
    sleep(made)
    wake(made)
    made.generate(PROMPT, 3)
    for _ in range(2):
        made.settle()
        for act in (reset, sleep) if first == "the reset" else (sleep, reset):
            act(made)
            made.step()
        wake(made)
        request = made.generate(PROMPT, 3)
        assert (request.loaded_tokens, request.output) == (48, answer(MODEL, PROMPT, 3))
    assert measured(made, "outdated_requests", CHAIN) == 0
