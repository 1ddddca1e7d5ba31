"""Checkpoints of other libraries, read without them and without running their pickles.

- `deepspeed`, `dcp`: what their files hold.
- `state`: their content as whole tensors by name; `convert`: writes it as a checkpoint of ours.
"""
