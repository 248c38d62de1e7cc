"""What all benchmarks have in common: one command line, time, resumable parts, processes, and their results."""
