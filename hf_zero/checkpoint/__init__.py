"""Checkpoints: ordinary safetensors files that all ranks write together, each its own bytes. Any number of ranks can read.

`files/` is what lies on a disk and which bytes of a rank go where; `ranks/` is writing and reading it together, also while
training continues. On them stand the two halves of a checkpoint, the model's and the optimizer's, and `commit`: all or nothing.
`offline/` reads without any ranks, for the command line; `importing/` reads other libraries' checkpoints; `export` makes whole
weights for other programs.
"""
