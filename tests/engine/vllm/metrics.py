"""A page of metrics as Prometheus reads it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "vllm:kvtiers_"


class Samples:
    """The samples of our metrics on a page."""

    def __init__(self, page: str) -> None:
        self._found = [
            (sample.name.removeprefix(PREFIX), sample.labels, sample.value)
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name.startswith(PREFIX)
        ]
        self.names = {name for name, _, _ in self._found}

    def value(self, name: str, **labels: str) -> float:
        """The value of the one sample with this name and these labels, among others."""
        (value,) = [
            value
            for found, has, value in self._found
            if found == name and labels.items() <= has.items()
        ]
        return value

    def state(self, tier: str) -> str:
        """The state of a tier, of which exactly one is 1."""
        (state,) = [
            labels["state"]
            for name, labels, value in self._found
            if name == "tier_state" and labels["tier"] == tier and value == 1
        ]
        return state
