"""The redis tier: blocks as values of servers of Redis or Valkey."""
