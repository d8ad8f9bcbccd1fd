"""What the kit finds in settings."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import SecretStr

from spec.offloading import StoreContext, StoreSpec
from tiers.testing import MemoryStore, StoreContract


class VeilSpec(StoreSpec):
    type: str = "veil"
    word: SecretStr

    def open(self, site: StoreContext) -> Any:
        return MemoryStore()


class Kit(StoreContract):
    __test__ = False

    def make_spec(self) -> StoreSpec:
        return VeilSpec(word=SecretStr("open sesame"))

    def open_store(self, payload_bytes: int) -> Any:
        return self.make_spec().open(StoreContext(payload_bytes))


def test_a_secret_that_json_hides_is_found() -> None:
    with pytest.raises(AssertionError, match=r"\['word'\] do not come back from JSON"):
        Kit().test_the_spec_comes_back_from_json()
