"""Which blocks a tier stores, and what they take until they are stored."""
