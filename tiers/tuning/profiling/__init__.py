"""Measures how fast a chain's tiers move blocks, once, by real stores and loads."""
