"""What prompts are worth keeping of layers with attention windows, on a trace of real prompts.

    python -m bench.windows [TRACE] [--requests N] [--sizes 0.5 1 5 20 100] [--json FILE]

Of a model with five layers in six that look back 1,024 tokens (as Gemma 3), a prefix needs what
these reach before its end, and of the others all. Kept is what windows reach from everywhere, every
so many tokens, or from where prefixes end alone (see `RequestTable.keeps_windows`). Sizes are in
percent of all that can be kept. The cpu tier's manager is real, without bytes; a prompt's windowed
parts count as five. The default trace is the conversation trace of the Mooncake project
(Apache-2.0, https://github.com/kvcache-ai/Mooncake, FAST25-release/traces).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.eviction import STAGING, Prompt, parser_of, replayed
from tiers.connector.policy.request_table import RequestTable
from tiers.connector.scheduler.host_manager import HostManager
from tiers.connector.scheduler.lookups import Lookup
from tiers.contract.block_groups import leading, usable
from tiers.contract.engine_info import EngineInfo, KVGroup
from tiers.cpu.spec import CpuSpec
from tiers.host.slots import SlotPool

BLOCK = 512
"""Tokens of a block of the trace."""
GROUPS = (KVGroup(BLOCK), *[KVGroup(BLOCK, window=1024)] * 5)
INTERVALS = {"everywhere": None, "every 8192": 8192, "where prefixes end": 0}
SIZES = (0.5, 1.0, 5.0, 20.0, 100.0)


@dataclass(frozen=True)
class Asked:
    """A prompt, as its whole blocks and a token more."""

    request_id: str
    block_hashes: Sequence[bytes]

    @property
    def num_tokens(self) -> int:
        return BLOCK * len(self.block_hashes) + 1

    num_prompt_tokens = num_tokens
    num_computed_tokens = 0


def serve(prompts: Sequence[Prompt], interval: int | None, slots: int) -> tuple[int, int]:
    """Blocks of prompts that are found, and parts of blocks that are stored."""
    engine = EngineInfo({}, BLOCK, BLOCK, 0, groups=GROUPS, window_interval=interval)
    requests = RequestTable(engine)
    groups = requests.groups
    pool = SlotPool(slots + STAGING)
    spec = CpuSpec.model_validate({"capacity": 1})
    manager = HostManager(spec.residency(pool, slots), pool)
    hits = stored = 0
    for number, prompt in enumerate(prompts):
        request = Asked(str(number), prompt)
        state = requests.of(request)
        keys = requests.keys(state)
        levels = groups.coverage(manager.coverage(Lookup(), keys, range(len(keys))))
        hits += usable(levels, groups.window)
        state.junction = leading(levels)
        kept = [
            block * len(groups) + part
            for block in range(len(prompt))
            for part, is_body in enumerate(groups.in_order)
            if is_body or requests.keeps_windows(state, block)
        ]
        offers = [keys[number] for number in kept]
        lacking = zip(kept, manager.touch_and_list_missing(offers), strict=True)
        new = [number for number, lacks in lacking if lacks]
        heads = manager.predecessors(keys, new)
        for start in range(0, len(new), STAGING):
            claims = [(keys[n], pool.claim(keys[n])) for n in new[start : start + STAGING]]
            for key, claim in reversed(claims):
                assert claim is not None, "the pool has room for every store"
                manager.complete_store(key, claim.slot, True, heads.get(key))
                pool.release(claim.slot)
        stored += len(new)
        requests.forget(request)
    return hits, stored


def measure(prompts: Sequence[Prompt], sizes: Sequence[float]) -> Iterator[dict[str, Any]]:
    """A row per size: slots, and of each way blocks that are found and parts that are stored."""
    whole = len({key for keys in prompts for key in keys}) * len(GROUPS)
    for size in sizes:
        slots = max(1, int(whole * size / 100))
        ways = {name: serve(prompts, interval, slots) for name, interval in INTERVALS.items()}
        yield {"percent": size, "slots": slots, **ways}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    options = parser_of("windows", __doc__, SIZES).parse_args(arguments)

    def line(row: dict[str, Any], blocks: int) -> str:
        return "".join(f"{row[n][0] / blocks:>14.1%}{row[n][1] / blocks:>8.2f}" for n in INTERVALS)

    said = "found of them, and parts stored of each"
    columns = "".join(f"{name:>22}" for name in INTERVALS)
    return replayed(options, partial(measure, sizes=options.sizes), said, columns, line)


if __name__ == "__main__":
    sys.exit(main())
