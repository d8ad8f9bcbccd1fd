"""GhostWatcher: shows the requests of a chain to the ghosts of its tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from spec.chain import ChainSpec
from tiers.connector.policy.requests import RequestTable
from tiers.contract.protocols import Request
from tiers.ghosts.ghosts import CLOSE_SECONDS, Ghosts, Setting


class GhostWatcher:
    """A `RequestObserver`: each request counts once, at its end, if the engine began it and no
    reset came meanwhile. As in the tiers, blocks of other adapters, images or generations are
    others."""

    def __init__(self, ghosts: Ghosts, requests: RequestTable) -> None:
        self._ghosts = ghosts
        self._requests = requests

    def arrived(self, request: Request) -> None:
        """Nothing yet."""

    def ended(self, request: Request) -> None:
        """Count it."""
        prompt, known = request.num_prompt_tokens, request.num_tokens
        state = self._requests.get(request)
        if state is None or state.is_outdated:
            return
        if request.num_computed_tokens or known > prompt:
            tag = self._requests.generation.tag
            marks = [(run, mark + tag) for run, mark in self._requests.marks(state) if mark + tag]
            self._ghosts.put(request.block_hashes, prompt, known, marks)

    def take_measures(self) -> Mapping[str, Mapping[str, float]]:
        """The estimates, where they are new."""
        return self._ghosts.take_measures()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Report a last time, once all that ended is counted, for which it waits so long."""
        self._ghosts.close(seconds)


def open_ghosts(
    chain: ChainSpec,
    requests: RequestTable,
    block_bytes: Callable[[], int],
    now: Callable[[], float],
) -> tuple[GhostWatcher, ...]:
    """The ghosts of a chain that has any. `block_bytes`: see `Ghosts`."""
    if not chain.ghosts:
        return ()
    settings, engine = list(_settings(chain)), requests.engine
    ghosts = Ghosts(settings, engine.block_tokens, engine.hash_tokens, block_bytes, now)
    return (GhostWatcher(ghosts, requests),)


def _settings(chain: ChainSpec) -> Iterator[Setting]:
    """Each tier that has ghosts as it is, and then its ghosts."""
    for tier in chain.tiers:
        name, threshold = tier.tier_name, tier.store_threshold
        ghosts = [ghost for ghost in chain.ghosts if ghost.tier == name]
        if ghosts:
            capacity: int = getattr(tier, "capacity")  # noqa: B009 - checked by ChainSpec
            yield Setting(name, name, capacity, threshold)
            for ghost in ghosts:
                yield Setting(
                    ghost.label, name, ghost.bytes_of(capacity), ghost.store_threshold or threshold
                )
