"""What an operator writes (the YAML chain) and what a plugin provides (an OffloadingSpec)."""
