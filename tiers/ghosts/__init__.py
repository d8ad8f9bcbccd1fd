"""Ghosts: a tier with other settings, estimated by sampled keys without blocks."""
