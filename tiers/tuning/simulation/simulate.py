"""`simulate`: a chain's decisions on a trace, and their time."""

from __future__ import annotations

from collections.abc import Iterable

from spec.chain import ChainSpec
from tiers.traces.trace import TraceRequest
from tiers.tuning.machine import Machine
from tiers.tuning.report import Report
from tiers.tuning.simulation.chain import SimChain
from tiers.tuning.simulation.engine import Engine
from tiers.tuning.simulation.measures import report_of
from tiers.tuning.simulation.tiers import tiers_of
from tiers.tuning.simulation.workload import Workload


def simulate(
    requests: Workload | Iterable[TraceRequest],
    block_tokens: int,
    chain: SimChain | ChainSpec,
    machine: Machine,
    *,
    warm: float = 0.0,
) -> Report:
    """Serve the requests with the chain on the machine; report on all but the first part.

    `block_tokens`: of a block, for engine and chain alike. `warm`: the fraction of the requests
    that only warms the caches, from 0 to less than 1. Who simulates many chains makes a `Workload`
    once. Raises TraceError for requests that are no trace, SpecError for a tier without a profile.
    """
    if not isinstance(requests, Workload):
        requests = Workload.of(requests, block_tokens)
    if isinstance(chain, ChainSpec):
        chain = SimChain.of(chain)
    tiers = tiers_of(chain, machine, requests)
    engine = Engine(requests, tiers, chain, machine, int(len(requests) * warm))
    engine.run()
    return report_of(engine, chain, machine)
