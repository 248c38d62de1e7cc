"""Latency-critical and best-effort programs on one GPU, in every arm, against each alone."""
