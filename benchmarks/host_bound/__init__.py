"""Eager servers, which keep their host busy and the GPU idle, beside best-effort programs."""
