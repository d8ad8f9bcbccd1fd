"""Edits a chain's YAML so that it becomes another chain, and leaves all else as it is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from spec.chain import ChainSpec
from spec.fields import exact_size, format_rate
from spec.load import parse_chain
from tiers.errors import KVTiersError
from tiers.tuning.machine import size_key
from tiers.tuning.search.budget import CHOSEN, Budget
from tiers.tuning.simulation.sim_chain import SimChain, SimTier


class CannotEdit(KVTiersError):
    """A chain's text is written in a way that can't be edited."""


def edited(text: str, present: ChainSpec, new: SimChain, budget: Budget) -> str:
    """Return the YAML of the present chain, changed to `new`, whose tiers that are not in `present`
    have the settings of the budget's media. Comments and all other keys stay. Raises CannotEdit."""
    result = text
    try:
        now = SimChain.of(present)
        for key in CHOSEN:
            if getattr(new, key) != getattr(now, key):
                result = _set(result, (), key, str(getattr(new, key)).lower())
        places: dict[str, Any] = {tier.type: place for place, tier in enumerate(now.tiers)}
        for tier in new.tiers:
            if (place := places.get(tier.type)) is not None:
                size = size_key(type(present.tiers[place]))
                for key, value in _differing(now.tiers[place], tier, size):
                    result = _set(result, ("tiers", place), key, value)
        if [tier.type for tier in new.tiers] != [tier.type for tier in now.tiers]:
            added = {t.type: _added(t, budget) for t in new.tiers if t.type not in places}
            result = _listed(result, "tiers", [{**places, **added}[t.type] for t in new.tiers])
            # A ghost says how fast its tier loads if the chain lacks that, and only then.
            names = {tier.name for tier in new.tiers}
            kept = [
                place
                for place, ghost in enumerate(present.ghosts)
                if (ghost.tier in names) == (ghost.load_rate is None)
            ]
            if len(kept) < len(present.ghosts):
                result = _listed(result, "ghosts", kept)
        if SimChain.of(parse_chain(result)) == new:
            return result
        why = "it is written so that no key can be changed alone"
    except (ValueError, yaml.YAMLError) as error:  # what an edit left may be no YAML, or no chain
        why = str(error)
    raise CannotEdit(f"the chain's file can't be edited: {why}: change it by hand")


def _differing(now: SimTier, new: SimTier, size: str | None) -> Iterator[tuple[str, str]]:
    """The keys whose value changes, and their new text. `size`: see `size_key`."""
    if new.capacity != now.capacity and new.capacity is not None and size is not None:
        yield size, exact_size(new.capacity)
    if new.eviction != now.eviction:
        yield "eviction", new.eviction
    if new.store_threshold != now.store_threshold:
        yield "store_threshold", str(new.store_threshold)
    if new.write_budget != now.write_budget and new.write_budget is not None:
        yield "write_budget", format_rate(new.write_budget)


def _set(text: str, loc: tuple[int | str, ...], key: str, value: str) -> str:
    """Give a key of a mapping another value, or add it behind the mapping's first key with one."""
    mapping = yaml.compose(text, yaml.SafeLoader)
    for part in loc:
        mapping = _value(mapping, part)
    if (there := _value(mapping, key)) is not None:
        start, end = there.start_mark.index, there.end_mark.index
        return f"{text[:start]}{value}{text[end:]}"
    assert isinstance(mapping, yaml.MappingNode)
    first, behind = mapping.value[0][0], _value(mapping, "type" if loc else "version")
    assert behind is not None
    at = behind.end_mark.index
    if mapping.flow_style:
        return f"{text[:at]}, {key}: {value}{text[at:]}"
    at = _line_end(text, at)
    return f"{text[:at]}\n{' ' * first.start_mark.column}{key}: {value}{text[at:]}"


def _listed(text: str, name: str, items: Sequence[int | Mapping[str, Any]]) -> str:
    """The text with these items in a list: those that are there, by their places, and new ones. A
    list that is left without any goes with its key."""
    chain = yaml.compose(text, yaml.SafeLoader)
    there = _value(chain, name)
    assert isinstance(chain, yaml.MappingNode) and isinstance(there, yaml.SequenceNode)
    if there.flow_style:
        spans = [(item.start_mark.index, item.end_mark.index) for item in there.value]
        made = [
            text[slice(*spans[item])]
            if isinstance(item, int)
            else yaml.safe_dump(item, default_flow_style=True, width=1 << 20).strip()
            for item in items
        ]
        return f"{text[: spans[0][0]]}{', '.join(made)}{text[spans[-1][1] :]}"
    ends = [_line_end(text, _end(item)) for item in there.value]
    if not items:
        key = next(key for key, value in chain.value if value is there)
        return f"{text[: key.start_mark.index]}{text[ends[-1] + 1 :]}"
    starts = [text.rindex("\n", 0, there.value[0].start_mark.index), *ends[:-1]]
    column = re.match(r"\n *", text[starts[0] :])
    chunks = []
    for item in items:
        if isinstance(item, int):
            chunks.append(text[starts[item] : ends[item]])
        else:
            lines = yaml.safe_dump([item], sort_keys=False).rstrip().split("\n")
            chunks += [f"{column[0] if column else ''}{line}" for line in lines]
    return f"{text[: starts[0]]}{''.join(chunks)}{text[ends[-1] :]}"


def _added(tier: SimTier, budget: Budget) -> dict[str, Any]:
    medium = budget.medium(tier.type)
    more = _differing(SimTier(tier.name, tier.type, tier.is_host), tier, medium.size_key)
    values = {key: yaml.safe_load(value) for key, value in more}
    return {"type": tier.type, **medium.settings, **values}


def _value(node: yaml.Node | None, part: int | str) -> yaml.Node | None:
    if isinstance(node, yaml.SequenceNode):
        return node.value[int(part)]  # type: ignore[no-any-return]
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return next((value for key, value in pairs if key.value == part), None)


def _end(node: yaml.Node) -> int:
    """Where a node's text ends; a block's own mark is that of what comes behind it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _line_end(text: str, at: int) -> int:
    found = text.find("\n", at)
    return len(text) if found < 0 else found
