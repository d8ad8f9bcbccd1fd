"""The index of a folder, in LMDB: which block is in which slot, and lookups in memory."""
