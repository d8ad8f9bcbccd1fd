"""The adapters to vLLM: its contract, what its KV depends on, and its own offloading."""
