"""The object tier: packs in a bucket of an object store."""
