"""The load policy that compares loading with computing."""
