"""Checkpoints of other libraries, read without them and without running their pickles.

- `deepspeed`, `dcp`: what their files hold.
- `state`: that as whole tensors by name; `convert`: that as a checkpoint of ours.
"""
