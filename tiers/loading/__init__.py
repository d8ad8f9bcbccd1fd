"""Whether a load is worth it: rules of the chain and of its simulation."""
