"""Benchmarks that users can run on their own machines, and by which hf_zero judges itself.

One folder a subject: `run` plans and prints, `worker` is what each rank's fresh process does. Engines take turns, round by
round, so that what else the machine does meets all of them alike. Figures are medians, with least and greatest.
"""
