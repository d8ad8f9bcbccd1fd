"""Stores around any store: guard, integrity, encryption, late opening."""
