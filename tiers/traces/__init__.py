"""Traces of traffic: when each request came and which blocks its prompt has; no token, no text."""
