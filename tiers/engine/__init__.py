"""The engines that drive connectors: vLLM, and a small one of our own for tests and traces."""
