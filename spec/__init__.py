"""The settings: the YAML chain of an operator, and the OffloadingSpec of a plugin."""
