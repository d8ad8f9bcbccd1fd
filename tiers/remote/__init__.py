"""The remote tier: blocks in a Redis or Valkey server that replicas share."""
