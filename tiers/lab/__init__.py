"""What proves the chain and shows it off; no engine needs it."""
