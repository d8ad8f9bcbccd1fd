"""An engine's identity: everything that its KV depends on, as the facts of a namespace."""
