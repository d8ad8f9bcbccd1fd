"""What a tier holds of a request: asked step by step, remembered while the request waits."""
