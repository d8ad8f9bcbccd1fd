"""Tiers that replicas share: blocks in a Redis or Valkey server, or packed in a bucket."""
