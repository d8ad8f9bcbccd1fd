"""The demo's plan: its prompts, the engines that answer them, and the phases of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from spec.document import read_yaml
from spec.load import load_chain
from tiers.errors import KVTiersError

COLD = "cold"
SCENES = {
    COLD: "first sight",
    "cpu": "same engine",
    "disk": "restarted",
    "remote": "other replica",
}
"""The phases in order, and the event before each.

In `cpu` the engine's own cache has evicted the prefix; in `remote` the disk path is fresh too.
"""


RETURNS = {
    "cpu": ("cpu", ()),
    "disk": ("disk", ("cpu",)),
    "remote": ("redis", ("cpu", "disk")),
}
"""By phase: the tier type that serves the prefix when it comes back, and the types that are empty
then."""


class NothingToShow(KVTiersError):
    """No phase can show anything of the chain."""


@dataclass(frozen=True)
class EngineRun:
    """One engine process: the chain's file it uses and the phases it goes through."""

    title: str
    chain: Path
    phases: tuple[str, ...]


@dataclass(frozen=True)
class DemoPlan:
    """The engines in order. `serving`: the names of the tiers that must serve each phase after
    cold. `skipped`: the reason for each phase that is left out."""

    runs: tuple[EngineRun, ...]
    serving: Mapping[str, frozenset[str]]
    skipped: Mapping[str, str]


def make_plan(chain: Path, folder: Path) -> DemoPlan:
    """Plan the demo of a chain's file; the replica's chain is written into `folder`. Raises what
    `load_chain` raises, and NothingToShow."""
    spec = load_chain(chain)
    types = [tier.type for tier in spec.tiers]
    skipped = {phase: why for phase, r in RETURNS.items() if (why := _why_not(*r, types))}
    shown = {phase: served_by for phase, (served_by, _) in RETURNS.items() if phase not in skipped}
    if not shown:
        reasons = "; ".join(f"{phase}: {why}" for phase, why in skipped.items())
        raise NothingToShow(f"{chain} has nothing that the demo could show ({reasons})")
    first = (COLD, "cpu") if "cpu" in shown else (COLD,)
    runs = [EngineRun("first engine", chain, first)]
    if "disk" in shown:
        runs.append(EngineRun("restarted engine", chain, ("disk",)))
    if "remote" in shown:
        runs.append(EngineRun("second replica", replica_chain(chain, folder), ("remote",)))
    serving = {
        phase: frozenset(tier.tier_name for tier in spec.tiers if tier.type == served_by)
        for phase, served_by in shown.items()
    }
    return DemoPlan(tuple(runs), serving, skipped)


def _why_not(served_by: str, emptied: Sequence[str], types: Sequence[str]) -> str:
    first = next((type_ for type_ in types if type_ not in emptied), None)
    if served_by not in types:
        return f"the chain has no {served_by} tier"
    if first != served_by:
        return f"the {first} tier comes before the {served_by} tier and would serve it"
    return ""


def default_chain(folder: Path, redis_url: str) -> Path:
    """Write the demo's own chain into `folder`; its disk tier lies there too."""
    path = folder / "chain.yaml"
    tiers = [
        {"type": "cpu", "capacity": "1GiB"},
        {"type": "disk", "capacity": "1GiB", "path": str(folder / "disk")},
        {"type": "redis", "url": redis_url, "ttl": "1h"},
    ]
    path.write_text(yaml.safe_dump({"version": 1, "tiers": tiers}, sort_keys=False))
    return path


def replica_chain(chain: Path, folder: Path) -> Path:
    """Write another replica's chain: `chain` with every disk tier in a fresh folder."""
    document: Any = read_yaml(chain.read_text(encoding="utf-8-sig")).data
    for number, tier in enumerate(document["tiers"]):
        if tier["type"] == "disk":
            tier["path"] = str(folder / f"replica-disk-{number}")
    path = folder / "replica.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


class Conversation(NamedTuple):
    """A prompt: a document, earlier questions with their answers, and a question, as messages
    `{"role": ..., "content": ...}`, oldest first."""

    title: str
    messages: list[dict[str, str]]


def load_prompts() -> tuple[Conversation, list[Conversation]]:
    """A short conversation to warm up, and those to measure, of several hundred tokens each."""
    source = resources.files("bench.demo") / "conversations.yaml"
    loaded = yaml.safe_load(source.read_text(encoding="utf-8"))
    return _conversation(loaded["warm_up"]), list(map(_conversation, loaded["conversations"]))


def _conversation(entry: dict[str, Any]) -> Conversation:
    texts = [text for turn in entry["turns"] for text in (turn["user"], turn["assistant"])]
    first, *others = [*texts, entry["question"]]
    messages = [
        {"role": "assistant" if number % 2 else "user", "content": text}
        for number, text in enumerate([f"{entry['document']}\n{first}", *others])
    ]
    return Conversation(entry["title"], messages)
