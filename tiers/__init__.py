"""kvtiers: the KV cache of earlier prompts, kept in a chain of tiers."""
