"""The conformance kit: tests that every store must pass, for authors of tiers.

Subclass `StoreContract` in a test file, say how to open your store, and let pytest collect it:

    class TestMyStore(StoreContract):
        shared = True
        persistent = True
        verifies = False

        @pytest.fixture(autouse=True)
        def place(self, tmp_path):
            self.path = tmp_path

        def open_store(self, payload_bytes):
            return MyStore(self.path, payload_bytes)

        def make_spec(self):
            return MySpec(type="mine", path=self.path)

Tests of what the class leaves unset are skipped, by name. The kit itself needs no pytest: its
tests are methods with plain asserts, and skip with `unittest.SkipTest`, which pytest understands.
With pytest, call `pytest.register_assert_rewrite("tiers.testing")` in your conftest.py to see what
they compared. `python -m tests.mutants`, in a checkout, shows what it finds and what it does not.

`MemoryStore` is the simplest store, and `GivenSpec` makes a tier of one.
"""

from tiers.testing.contract import StoreContract
from tiers.testing.harness import Memory, make_key, payload_of
from tiers.testing.memory_store import GivenSpec, MemoryStore
from tiers.testing.policy_tests import AdmissionContract, EvictionContract

__all__ = [
    "AdmissionContract",
    "EvictionContract",
    "GivenSpec",
    "Memory",
    "MemoryStore",
    "StoreContract",
    "make_key",
    "payload_of",
]
