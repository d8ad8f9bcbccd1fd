"""A tier's folder: who has it open, what is repaired at open, and what is done for it since."""
