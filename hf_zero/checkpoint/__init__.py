"""Checkpoints: ordinary safetensors files that all ranks write together, each its own bytes. Any number of ranks can read.

- `pieces`, `trace`: which bytes of a rank go where, learnt from a run on meta tensors.
- `tensor_file`, `disk`: one safetensors file; every change on disk as a function that a test can make fail.
- `manifest`, `model_plan`, `cooperative`: what a checkpoint holds, and writing it together.
- `commit`, `background`: saving all or nothing, and saving while training continues.
- `model_state`, `optimizer_state`, `export`: the two halves of a checkpoint; whole weights for other programs;
  `one_writer`: what every rank has whole.
- `inspection`, `offline`: reading and exporting without ranks, for the command line.
- `importing/`: other libraries' checkpoints.
"""
