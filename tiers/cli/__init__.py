"""The kvtiers command; a module here imports nothing heavy before its command runs."""
