"""GPU memory: the pool against other allocators."""
