"""Stores around any store: guard, integrity, encryption, late opening, a put process."""
