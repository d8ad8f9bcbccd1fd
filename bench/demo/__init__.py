"""The demo: a real engine, real prompts, and a prefix that comes back from every tier."""
