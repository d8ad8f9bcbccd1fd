"""Batches of a worker's puts, which end where groups of a prompt do, for stores that pack them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tiers.store import Packs, Prefix, TierStore, capability


def in_packs(prefixes: Sequence[Prefix | None]) -> list[int]:
    """The places of blocks with these prefixes, in the order in which to put them. Those of one
    prefix come in a row, else the parts of a block would split a pack; those without one come last.
    """
    of_prefix = [0 if prefix is None else id(prefix.keys) for prefix in prefixes]
    rows = {keys: row for row, keys in enumerate(dict.fromkeys(of_prefix)) if keys}
    return sorted(range(len(prefixes)), key=lambda at: rows.get(of_prefix[at], len(prefixes)))


def batches(prefixes: Sequence[Prefix | None], most: int) -> Iterator[range]:
    """Split blocks with these prefixes into ranges of `most` at most. A range that has the end of a
    group ends with the last such end, so that the next one begins a group."""
    start = 0
    while start < len(prefixes):
        stop = min(start + most, len(prefixes))
        if stop < len(prefixes):
            ends = range(stop, start, -1)
            stop = next((end for end in ends if _ends_group(*prefixes[end - 1 : end + 1])), stop)
        yield range(start, stop)
        start = stop


def _ends_group(prefix: Prefix | None, behind: Prefix | None) -> bool:
    if prefix is None or behind is None or behind.keys is not prefix.keys:
        return True
    return (prefix.at + 1) % prefix.group == 0


def held_before(
    store: TierStore, names: Sequence[bytes], prefixes: Sequence[Prefix | None]
) -> list[bool]:
    """Which of these blocks the store has. One that packs prompts is asked for each group by
    itself: with attention windows the groups before may be missing."""
    packs = capability(store, Packs)
    groups = {
        _group(p): p.keys[p.at - p.at % p.group :][: p.group] for p in prefixes if p is not None
    }
    if packs is None or not groups:
        return store.has(names)
    counts = dict(zip(groups, packs.held_prefix([*groups.values()]), strict=True))
    alone = [name for name, prefix in zip(names, prefixes, strict=True) if prefix is None]
    of_alone = iter(store.has(alone) if alone else ())
    return [next(of_alone) if p is None else p.at % p.group < counts[_group(p)] for p in prefixes]


def _group(prefix: Prefix) -> tuple[int, int]:
    return id(prefix.keys), prefix.at // prefix.group
