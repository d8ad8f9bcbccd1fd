"""Which hosts an engine is on, and which tiers it can't use there."""

from __future__ import annotations

from collections.abc import Sequence

from spec.offloading import StoreSpec
from tiers.contract.messages import WorkerHandshake
from tiers.errors import TierUnusable
from tiers.store import Clear, TierStore, capability


def is_local(tier: StoreSpec, store: TierStore | None) -> bool:
    """Whether the tier's blocks are found on the host alone that stored them.

    Where its settings don't tell, a store that answers from memory, or is of its host alone, is
    taken for one; None: not opened yet.
    """
    if tier.host_local is not None:
        return tier.host_local
    return tier.is_prompt or (store is not None and capability(store, Clear) is not None)


def refuse_several(handshakes: Sequence[WorkerHandshake], scheduler: str) -> None:
    """Raise TierUnusable, naming who is where, if the scheduler and the ranks of an engine are not
    all on one host. Who does not say where it is counts as being with the others."""
    ranks: dict[str, list[int]] = {scheduler: []} if scheduler else {}
    for handshake in handshakes:
        if handshake.host:
            ranks.setdefault(handshake.host, []).append(handshake.rank)
    if len(ranks) < 2:
        return
    places = [
        f"{' and '.join(_who(numbers, host == scheduler))} on {host}"
        for host, numbers in ranks.items()
    ]
    raise TierUnusable(
        "its blocks can be found on the host alone that stored them, and this engine is on several "
        f"({'; '.join(places)}). Use a tier that all hosts share, like redis, or cpu"
    )


def _who(ranks: list[int], has_scheduler: bool) -> list[str]:
    who = ["the scheduler"] if has_scheduler else []
    if ranks:
        who.append(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}")
    return who
