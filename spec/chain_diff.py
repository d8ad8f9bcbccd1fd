"""What differs between two chains, tier by tier, and what no running engine takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from spec.chain import ChainSpec, place_of
from spec.fields import mask_secrets
from spec.offloading import HostSpec, OffloadingSpec

Kind = Literal["kept", "changed", "resized", "reopened", "added", "drained"]
"""What becomes of a tier. `changed`: it takes its settings while it works. `reopened`: it is closed
and opened again with them; meanwhile its blocks are misses."""

RESTART = "restart the engine with it"
START = {
    "salt": f"every block is named by it: {RESTART}",
    "staging": f"host memory is taken at the start: {RESTART}",
    "on_reset": f"it holds for all blocks stored so far: {RESTART}",
    "trust_client_ids": f"blocks of images are named by it: {RESTART}",
    "events": f"routers know this engine's events as they are: {RESTART}",
    "explain": f"notes are kept from the start: {RESTART}",
    "control": f"the socket that takes this change is opened at the start: {RESTART}",
}
"""Keys of a chain that only a start takes, and why."""
IN_PLACE = frozenset(
    {"store_threshold", "paused", "max_inflight", "write_budget"}
    | {"deadline", "store_rate", "load_rate", "maxmemory"}
)
"""Keys of any tier that it takes while it works, or that change nothing in an engine."""
SHOWN = (str, int, float, bool)


class KeyChange(NamedTuple):
    """A setting that differs: its key, and both values as an operator writes them; empty: they are
    not shown."""

    key: str
    before: str = ""
    after: str = ""

    def __str__(self) -> str:
        return (
            f"{self.key}: {self.before} -> {self.after}" if self.after else f"{self.key}: changed"
        )


class TierChange(NamedTuple):
    """One tier. `before`, `after`: its load priority, from 1; None: only the other chain has it."""

    name: str
    kind: Kind
    before: int | None
    after: int | None
    keys: tuple[KeyChange, ...] = ()

    def __str__(self) -> str:
        place = "" if self.after is None else f", load priority {self.after}"
        if self.before not in (None, self.after) and self.after is not None:
            place += f" (now {self.before})"
        keys = "".join(f"; {key}" for key in self.keys)
        return f"tier {self.name}: {self.kind}{place}{keys}"


@dataclass(frozen=True)
class ChainDiff:
    """What a change of one chain to another does; nothing of it happens if any is `refused`.

    `settings`: of the chain itself. `refused`: a line for each reason, with what to do.
    """

    tiers: tuple[TierChange, ...]
    settings: tuple[KeyChange, ...] = ()
    refused: tuple[str, ...] = ()

    def of_kind(self, *kinds: Kind) -> tuple[str, ...]:
        """The names of the tiers of these kinds."""
        return tuple(tier.name for tier in self.tiers if tier.kind in kinds)

    def lines(self) -> list[str]:
        """The change as text, a line for each tier, setting and refusal."""
        refused = [f"refused: {why}" for why in self.refused]
        return [*map(str, self.tiers), *map(str, self.settings), *refused]

    def as_json(self) -> dict[str, Any]:
        """The change as plain data."""
        return {
            "tiers": [
                {**tier._asdict(), "keys": [key._asdict() for key in tier.keys]}
                for tier in self.tiers
            ],
            "settings": [key._asdict() for key in self.settings],
            "refused": list(self.refused),
        }


def diff(old: ChainSpec, new: ChainSpec) -> ChainDiff:
    """Compare the chain that an engine runs with another. Reads nothing but the two."""
    settings = tuple(_differing(old, new, but=("version", "tiers")))
    refused = [f"{key.key}: {START[key.key]}" for key in settings if key.key in START]
    before = {tier.tier_name: tier for tier in old.tiers}
    after = {tier.tier_name: tier for tier in new.tiers}
    refused += _renamed(before, after)
    tiers: list[TierChange] = []
    places = {name: place for place, name in enumerate(before, 1)}
    for place, (name, tier) in enumerate(after.items(), 1):
        keys = tuple(_differing(before[name], tier)) if name in before else ()
        kind = _kind(tier, {key.key for key in keys}) if name in before else "added"
        tiers.append(TierChange(name, kind, places.get(name), place, keys))
        refused += _refusals(before.get(name), tier, kind, {key.key for key in keys})
    for name, tier in before.items():
        if name not in after:
            tiers.append(TierChange(name, "drained", places[name], None))
            refused += _refusals(tier, None, "drained", set())
    return ChainDiff(tuple(tiers), settings, tuple(refused))


def _differing(
    old: BaseModel, new: BaseModel, but: tuple[str, ...] = ("name",)
) -> Iterator[KeyChange]:
    if type(old) is not type(new):
        yield KeyChange("type", str(getattr(old, "type", "")), str(getattr(new, "type", "")))
        return
    fields = type(new).model_fields
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    for key, field in fields.items():
        if key in but or getattr(old, key) == getattr(new, key):
            continue
        values = before.get(key), after.get(key)
        if field.repr and all(value is None or isinstance(value, SHOWN) for value in values):
            yield KeyChange(key, *("unset" if v is None else mask_secrets(str(v)) for v in values))
        else:
            yield KeyChange(key)


def _kind(new: OffloadingSpec, keys: set[str]) -> Kind:
    if not keys:
        return "kept"
    if keys <= IN_PLACE:
        return "changed"
    if keys <= IN_PLACE | {"capacity"} and new.resizes:
        return "resized"
    return "reopened"


def _refusals(
    old: OffloadingSpec | None, new: OffloadingSpec | None, kind: Kind, keys: set[str]
) -> Iterator[str]:
    tier = new or old
    assert tier is not None
    is_host = any(isinstance(one, HostSpec) for one in (old, new))
    if "encryption" in keys:
        yield f"tier {tier.tier_name}: encryption: blocks have other names with it: {RESTART}"
    elif is_host and kind in ("reopened", "added", "drained"):
        what = ", ".join(sorted(keys)) or "a tier in host memory that comes or goes"
        why = f"the engine takes its host memory at the start: {RESTART}"
        yield f"tier {tier.tier_name}: {what}: {why}, or change its capacity alone"


def _renamed(before: dict[str, OffloadingSpec], after: dict[str, OffloadingSpec]) -> Iterator[str]:
    """Tiers that keep their blocks where one of another name does: unnamed ones of one type have
    their names by their order."""
    there = {place: name for name, tier in before.items() if (place := place_of(tier))}
    for name, tier in after.items():
        known = there.get(place_of(tier), name)
        if known != name:
            yield (
                f"tier {name}: the running engine calls this tier {known!r}: write name: {known}, "
                "or restart the engine"
            )
