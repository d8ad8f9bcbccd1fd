"""A worker's half of one tier: it moves the bytes."""
