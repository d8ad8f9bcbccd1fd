"""A tier's folder: who has it open, its repair at an open, and its upkeep."""
