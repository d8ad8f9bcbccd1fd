"""What an engine calls, and what the two halves of a tier say to each other."""
