"""A tier as the scheduler sees it: one in the host pool, or one behind a store."""
