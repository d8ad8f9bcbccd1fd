"""The engine and the store that tests of whole chains have."""

from tests.engine.conftest import engine, store

__all__ = ["engine", "store"]
