"""`kvtiers try`: two processes share blocks through a chain, without a model."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

from spec.chain import ChainSpec
from spec.offloading import HostSpec, OffloadingSpec
from tiers.connector.assembly import scheduler_parts, worker_parts
from tiers.connector.multi.multi_scheduler import MultiScheduler
from tiers.connector.multi.multi_worker import MultiWorker
from tiers.contract.engine_info import EngineInfo
from tiers.gpu.copier import open_copier
from tiers.host.slots import slot_stride
from tiers.lab.replay.engine import ReplayEngine
from tiers.lab.replay.model import ReplayModel, answer
from tiers.lab.replay.scaling import WITHOUT_TRAFFIC
from tiers.lab.replay.worker import LocalWorker
from tiers.lab.server import in_own_place

MODEL = ReplayModel()
PROMPTS = [list(range(start, start + 120)) for start in range(0, 1200, 200)]
MOST = 64 << 20
"""Bytes of a tier's capacity here, at most."""
_HOST_SLOTS = 1024


class Seen(NamedTuple):
    """What one process saw of the chain: prompts and wrong answers, and by tier the blocks that it
    stored and the tokens that it loaded."""

    prompts: int
    wrong: int
    stored: Mapping[str, int]
    loaded: Mapping[str, int]


def try_chain(chain: ChainSpec, folder: Path) -> list[Seen]:
    """Run the same prompts in two engines, one process after the other, over the chain's tiers in
    empty places below `folder`; the first asks each twice. Raises NoPlace."""
    with ExitStack() as stack:
        tiers = tuple(_small(tier, folder, stack) for tier in chain.tiers)
        staging = _HOST_SLOTS * slot_stride(MODEL.payload_bytes)
        more = {"tiers": tiers, "staging": staging, "load_when": "always", "warm": None}
        tried = chain.model_copy(update={**WITHOUT_TRAFFIC, **more})
        context = multiprocessing.get_context("spawn")
        seen = []
        for rounds in (2, 1):
            with context.Pool(1) as process:
                seen.append(process.apply(_run, (tried, rounds)))
        return seen


def _small(tier: OffloadingSpec, folder: Path, stack: ExitStack) -> OffloadingSpec:
    found = in_own_place(tier, folder / tier.tier_name, stack)
    if isinstance(found, HostSpec):
        most = _HOST_SLOTS * slot_stride(MODEL.payload_bytes)
        return found.model_copy(update={"capacity": most})
    if found.capacity_bytes > MOST:
        return found.model_copy(update={"capacity": MOST})
    return found


def _run(chain: ChainSpec, rounds: int) -> Seen:
    wrong = 0
    size = MODEL.block_tokens
    info = EngineInfo({"model": "replay"}, size, size, 64, caches_prefixes=False, step_tokens=256)
    connector = MultiScheduler(*scheduler_parts(chain, info))
    half = MultiWorker(*worker_parts(chain, info, open_copier))
    worker = LocalWorker(MODEL, info.num_blocks, half)
    with closing(ReplayEngine(MODEL, info, connector, worker)) as engine:
        for _ in range(rounds):
            for prompt in PROMPTS:
                wrong += engine.generate(prompt, 4).output != answer(MODEL, prompt, 4)
            engine.settle()
    counted = {tier.tier_name: engine.stats.data.get(tier.tier_name, {}) for tier in chain.tiers}

    def by_tier(metric: str) -> dict[str, int]:
        found = ((name, values.get(metric, 0)) for name, values in counted.items())
        return {name: int(value) for name, value in found if not isinstance(value, list)}

    prompts = rounds * len(PROMPTS)
    return Seen(prompts, wrong, by_tier("stored_blocks"), by_tier("loaded_tokens"))
