"""Who an engine is to its tiers: all that its KV depends on, as the facts of a namespace."""
