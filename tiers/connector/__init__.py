"""Connectors, engine-neutral: one half of a tier decides, the other moves bytes."""
