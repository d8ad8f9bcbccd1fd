"""Checks of a chain, and of the machine, engine and plugins around it, before an engine starts."""
