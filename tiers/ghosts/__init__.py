"""Ghosts: what a tier would serve with other settings, by sampled keys and no blocks."""
