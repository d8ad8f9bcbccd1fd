"""What lies around a tier's store: the guard, encryption, and how it is opened."""
