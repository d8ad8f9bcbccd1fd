"""A running engine's socket: its status, its explanations, and whoever asks for them."""
