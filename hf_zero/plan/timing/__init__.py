"""How long a step takes: what units compute, what they cost on some machine, and the engine's schedule, played.

[Note: time] Three things make a prediction. `work` runs one forward and backward on tensors without values, and counts by unit
what operators compute, read and write. `machines` has rates, stated by data sheets or measured on this machine, which turn
that into seconds. `schedule` plays a step with these: gathers ahead within `prefetch_bytes`, reductions within `bucket_bytes`,
one exchange after the other, beside what computes. `predicting` joins them for a row of the plan.
"""
