"""What ranks know of values at rest: which value a tensor has, whatever rank names it, and how others can make it.

`lineage.py` says how a value came to be, `entries.py` finds values by their keys, `values.py` gives them to ranks that ask.
"""
