"""A tier that keeps blocks in an SQLite file: `kvtiers new-tier` writes a distribution from it."""
