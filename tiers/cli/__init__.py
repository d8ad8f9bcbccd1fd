"""The kvtiers command; nothing heavy is imported before a command runs."""
