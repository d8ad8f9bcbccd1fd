"""Notes of each request, and an account for whoever asks why it was served so."""
