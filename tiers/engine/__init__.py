"""The adapters to vLLM, and a small engine of our own for tests and traces."""
