"""The soak: the replay engine for minutes or days, while everything below it breaks."""
