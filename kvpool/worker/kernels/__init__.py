"""Triton kernels, and how decoding splits its KV range."""
