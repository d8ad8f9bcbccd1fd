"""The CPU tier: blocks kept in the engine's own host pool."""
