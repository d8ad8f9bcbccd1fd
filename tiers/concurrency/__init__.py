"""Threads, counters and rates."""
