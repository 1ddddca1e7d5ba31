"""The engine: what runs in a training step. It knows torch only, and works on any `nn.Module`.

Its rooms stand on each other: `ranks/` (who trains together), `parameters/` (one parameter at rest), `units/` (which
parameters are whole, and until when), `backward/` (one backward), `modules/` (what is hung on a model). `engine` wires them and
hears of a forward's events; `gathered_parameters` is the users' way to whole weights. One training step is told in `units/`,
one backward in `backward/`.

[Note: what users' code may do] Four rules, each written where it is kept: *an edit is seen* before it happens
(`parameters/partitioned_tensor`); *whoever reads gets the whole* while a forward or backward runs (`units/reading`);
*gradients under no_sync* are `.grad` itself, not a picture of it (`backward/accumulation`); *saved weights* are places, not
tensors, so that no backward reads released memory (`units/saved`).
"""
