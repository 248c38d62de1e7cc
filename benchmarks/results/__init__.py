"""Committed results, and the schema that every one of them meets."""
