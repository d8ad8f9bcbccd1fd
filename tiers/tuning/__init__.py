"""Curves, simulations and searches of chains, from a trace."""
