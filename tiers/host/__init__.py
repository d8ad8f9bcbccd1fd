"""Host memory: slots, who uses them, and where their bytes are."""
