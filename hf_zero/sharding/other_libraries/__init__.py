"""What partitioning changes of torch and PEFT, for models that are partitioned: one file for each thing that they do.

`install` makes all the changes, and the three public doors call it. Each is one of `hf_zero.changes`, so `zero.undo()` puts
it back. Changes of accelerate and of the Trainer live in `integrations`.
"""
