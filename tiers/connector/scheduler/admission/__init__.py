"""What one tier stores and keeps, by its settings, its speed and whose the blocks are."""
