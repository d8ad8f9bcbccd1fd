"""The YAML of an operator, and the OffloadingSpec of a plugin."""
