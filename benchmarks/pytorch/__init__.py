"""Regions with streams of their own in PyTorch programs: what they cost, and what threads of one process gain."""
