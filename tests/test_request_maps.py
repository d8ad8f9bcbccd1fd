"""What is known of a request lies in one place: few maps in the connector are keyed by requests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "tiers"
MOST = 8
MAPS = {"dict", "defaultdict", "OrderedDict", "Counter", "set", "WeakKeyDictionary"}
NAMES = {"str", "Request", "RequestState", "TierRequest", "Any", "object"}
"""Types of keys that may be a request or its name."""

REQUESTS = {
    "observers.py::TrafficRecorder._arrivals": "an observer, which hears of requests alone",
    "multi/multi_scheduler.py::MultiScheduler._loading": "of one given up, too, whose blocks a "
    "rank may still fill",
    "multi/multi_scheduler.py::MultiScheduler._received": "as those",
    "multi/multi_scheduler.py::MultiScheduler._more_saves": "finished; until the next step",
    "multi/multi_worker.py::MultiWorker._loads_awaited": "on a worker, which learns of steps alone",
    "multi/multi_worker.py::MultiWorker._saves_awaited": "on a worker",
    "policy/request_table.py::RequestTable._states": "all else that is known of a request",
    "policy/request_table.py::RequestTable._unmarked": "it has no state before its media are known",
}
"""Maps that are keyed by requests, and why not the state of the request has it."""

MESSAGES = ("contract/messages.py", "multi/multi_connector.py")
"""Files of what the halves tell each other: nobody keeps it."""

OTHERS = {
    "contract/stats.py::TierStats.data": "tiers",
    "live_chain.py::LiveChain._opened": "keys of a chain",
    "multi/multi_scheduler.py::MultiScheduler._loaders": "children",
    "scheduler/jobs.py::Jobs._counts": "kinds of jobs",
    "policy/chooser.py::Chooser._foreign": "children",
    "policy/chooser.py::Chooser._loaders": "children",
    "policy/request_state.py::RequestState.tiers": "tiers",
    "scheduler/admission.py::AcceptanceMonitor._lost": "counters",
    "policy/tenant_counts.py::TenantCounts._counts": "tenants",
    "policy/tenant_counts.py::TenantCounts._unvalued": "tenants",
    "policy/doubts.py::Doubts._sent": "names of weights, by blocks",
    "policy/request_state.py::RequestState.cached": "tiers",
    "policy/request_state.py::RequestState.sent": "names of weights",
    "policy/request_state.py::RequestState.to_offer_again": "tiers",
    "scheduler/tier_hints.py::PinnedBlocks._counts": "tenants",
    "scheduler/tier_hints.py::PinnedBlocks._ending[until]": "blocks",
    "scheduler/offloading_scheduler.py::OffloadingScheduler._reported": "gauges",
    "scheduler/offloading_scheduler.py::OffloadingScheduler._totals": "measures",
    "scheduler/admission.py::Tenants._kept": "tenants",
    "worker/host_slots.py::HostSlots._refused": "tiers",
    "worker/offloading_worker.py::OffloadingWorker._measures": "measures",
    "worker/offloading_worker.py::OffloadingWorker._totals": "measures",
}
"""Other maps with such keys, and what those are."""


def is_map(annotation: ast.expr | None, aliases: set[str]) -> bool:
    """Whether an annotation has a map in it whose keys may be requests."""
    for node in ast.walk(annotation) if annotation is not None else ():
        if isinstance(node, ast.Name) and node.id in aliases:
            return True
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).split(".")[-1] in MAPS:
            key = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
            if any(isinstance(n, ast.Name) and n.id in NAMES for n in ast.walk(key)):
                return True
    return False


def is_unnamed_map(value: ast.expr) -> bool:
    """Whether an attribute that is not annotated is given a new map."""
    if isinstance(value, ast.Dict | ast.DictComp | ast.Set | ast.SetComp):
        return True
    made = value.func if isinstance(value, ast.Call) else None
    made = made.value if isinstance(made, ast.Subscript) else made
    return made is not None and ast.unparse(made).split(".")[-1] in MAPS


def aliases_of(tree: ast.Module) -> set[str]:
    """Names that a module gives to types of such maps."""
    return {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and is_map(node.value, set())
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def kept_maps(path: str, tree: ast.Module, aliases: set[str]) -> Iterator[str]:
    """Attributes of classes, as `path::Class.name`, that are maps whose keys may be requests."""
    for owner in [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
        annotated: dict[str, ast.expr] = {}
        given: set[str] = set()
        for node in ast.walk(owner):
            if isinstance(node, ast.AnnAssign):
                named = ast.unparse(node.target).removeprefix("self.")
                is_field = node in owner.body or ast.unparse(node.target).startswith("self.")
                annotated |= {named: node.annotation} if is_field else {}
            elif isinstance(node, ast.Assign) and is_unnamed_map(node.value):
                targets = [ast.unparse(target) for target in node.targets]
                given |= {t.removeprefix("self.") for t in targets if t.startswith("self.")}
        found = {name for name, one in annotated.items() if is_map(one, aliases)}
        yield from (f"{path}::{owner.name}.{name}" for name in found | (given - annotated.keys()))


def test_few_maps_are_keyed_by_requests() -> None:
    trees = {
        str(path.relative_to(ROOT)).removeprefix("connector/"): ast.parse(path.read_text())
        for room in ("connector", "contract")
        for path in sorted((ROOT / room).rglob("*.py"))
    }
    aliases = set().union(*map(aliases_of, trees.values()))
    found = {
        name
        for path, tree in trees.items()
        if path not in MESSAGES
        for name in kept_maps(path, tree, aliases)
    }
    assert found == {*REQUESTS, *OTHERS}, "say what its keys are; requests belong in RequestState"
    assert len(REQUESTS) <= MOST


def test_the_rule_itself() -> None:
    text = """
Limits = dict[str, int]
class C:
    a: dict[str, int]
    b: dict[bytes, int]
    def __init__(self) -> None:
        self.c: set[RequestState] = set()
        self.d: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        self.e: Limits | None = None
        self.f = {}
        self.g = Counter[str]()
        self.h: dict[int, str] = {}
        local: dict[str, int] = {}
"""
    tree = ast.parse(text)
    found = set(kept_maps("p", tree, aliases_of(tree)))
    assert found == {f"p::C.{name}" for name in "acdefg"}
