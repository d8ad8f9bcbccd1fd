"""The engine's paged KV as bytes, and the copies between it and host memory."""
