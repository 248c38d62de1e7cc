"""Time slices of the best-effort program's own: long kernels beside servers, in every arm."""
