"""One parameter at rest: what users hold between forwards, and what the engine knows of it.

At rest a parameter is a `PartitionedTensor` over this rank's rows. It looks like the model's own tensor (shape, dtype,
identity), and tells its engine before anything changes it. `ZeroParameter` is the engine's record of it: where it is cut, who
holds it, what modules see while it is whole. Special kinds live here as well: parts of a tensor axis, quantised bytes, rows on
a disk. Nothing in this room gathers a unit: that is `units/`.
"""
