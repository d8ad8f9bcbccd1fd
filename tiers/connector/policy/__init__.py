"""Which tier serves which block of a request."""
