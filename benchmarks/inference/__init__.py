"""Serving: what a request costs in `cudasched.inference`, and beside Triton Inference Server."""
