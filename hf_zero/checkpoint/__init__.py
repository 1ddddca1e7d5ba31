"""Checkpoints: ordinary safetensors that all ranks write together, each its own bytes, and any number of ranks reads.

- `pieces`, `trace`: which bytes of a rank go where, learnt from a run on meta tensors.
- `tensor_file`, `disk`: one safetensors file; every change on disk as a function that a test can make fail.
- `manifest`, `model_plan`, `cooperative`: what a checkpoint holds, and writing it together.
- `commit`, `background`: all or nothing, and while training goes on.
- `model_state`, `optimizer_state`, `export`: the two halves of a checkpoint; whole weights for other programs.
- `inspection`, `offline`: reading and exporting without ranks, for the command line.
- `importing/`: other libraries' checkpoints.
"""
