"""Who trains together, and in which dtypes.

A `World` is what every other room is given: the configuration, the axes of ranks with their exchanges, the device and the
ledger. Nothing here knows a unit or an engine. What ranks must have in common (the same batch where they share layers, the
same gradients of what they both hold) is looked at here too, since nothing else would notice: training would only drift.
Which ranks exchange with each other at all is the floor below, `comm`.
"""
