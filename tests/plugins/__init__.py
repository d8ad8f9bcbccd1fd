"""Plugins as authors wrote them for a version of the plugin API. They are never changed."""
