"""An engine that sleeps: its paged KV goes away and comes back with other bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from spec.chain import ChainSpec
from tests.support.replay import ReplayEngine, answer
from tests.support.replay_chains import MODEL, chain_of, cpu, disk, measured
from tests.support.slow_store import LONG, SlowSpec, TroubledStore, ask
from tiers.gpu.copier import CpuCopier
from tiers.lab.replay.requests import Status
from tiers.lab.replay.worker import LocalWorker

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
    """The paged KV of all layers."""
    (worker,) = made.workers
    assert isinstance(worker, LocalWorker)
    return list(worker.kv.values())


def sleep(made: ReplayEngine) -> None:
    """Take the paged KV away; the engine's own cache knows nothing of it any more."""
    (worker,) = made.workers
    assert isinstance(worker, LocalWorker) and worker.connector is not None
    worker.connector.unregister_kv_caches()
    worker.connector.unregister_kv_caches()
    for layer in paged(made):
        layer.fill_(GONE)
    made.scheduler.pool.forget_all()


def wake(made: ReplayEngine) -> None:
    """Give the memory back; the engine collects the handshakes again."""
    (worker,) = made.workers
    assert isinstance(worker, LocalWorker) and worker.connector is not None
    worker.connector.restore_kv_caches()
    assert made.connector is not None
    made.connector.set_xfer_handshake_metadata({0: worker.handshake()})


def test_blocks_on_their_way_out_are_stored_as_they_were(
    engine: MakeEngine, tmp_path: Path
) -> None:
    chain = chain_of(cpu(), disk(tmp_path))
    made = engine(chain, open_copier=LateGathers)
    prompt = list(range(40))
    made.add(prompt, 1)
    while made.scheduler.requests:
        made.step()
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
