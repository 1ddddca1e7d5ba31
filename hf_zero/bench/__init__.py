"""Benchmarks that a user runs on their own machine, and that hf_zero judges itself by."""
