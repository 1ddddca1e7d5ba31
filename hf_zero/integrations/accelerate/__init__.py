"""Custom loops on accelerate.

- `accelerator`: `ZeroPlugin` and `ZeroAccelerator`.
- `checkpoint`: `save_state` and `load_state`; `places`: names and folders of checkpoints.
- `data_order`: continuing within an epoch with the same order of samples.
"""
