"""What an engine calls, and what both halves of a tier send each other."""
