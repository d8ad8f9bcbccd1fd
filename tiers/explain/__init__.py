"""Why each request was served as it was: what is noted of it, and who may ask."""
