"""The KV-connector contract, engine-neutral: who decides, who moves bytes, what they say."""
