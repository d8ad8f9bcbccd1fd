"""What a tier holds: inspect, verify, mend, move."""
