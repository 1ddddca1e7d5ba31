"""Ranks that write and read files together.

Each rank writes its own rows where all see one folder of one host; elsewhere files are cut into windows, and each window is put
together by the rank that writes it. It may happen beside training, in a thread with process groups of its own. What every rank
holds whole is written by one of them.
"""
