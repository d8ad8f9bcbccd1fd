"""The search for the chain that serves a trace best within a budget."""
