"""What cudasched costs and gains, measured; run from the repository root with `python -m benchmarks.NAME`."""
