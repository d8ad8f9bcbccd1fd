"""The shared tier: packs in a directory that hosts share."""
