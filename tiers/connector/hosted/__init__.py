"""A tier under vLLM's own OffloadingConnector."""
