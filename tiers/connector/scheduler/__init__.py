"""The scheduler's half of one tier: look up, load, store, evict, report."""
