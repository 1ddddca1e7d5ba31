"""Benchmarks that users can run on their own machines, and by which hf_zero judges itself."""
