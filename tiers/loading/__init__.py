"""What loads cost and whether they are worth it: rules of the chain, and of its simulation."""
