"""What requests say of the future of their blocks, obeyed in one tier."""
