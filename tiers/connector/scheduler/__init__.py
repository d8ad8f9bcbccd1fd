"""The scheduler's half of one tier: what to load, what to store, what it holds."""
