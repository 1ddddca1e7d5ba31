"""Optimizer states on a disk: a step that goes through them in pieces.

One piece is read while another is stepped on and a third is written. The optimizer's own code runs on each piece, so its class
must not mind: that is tried first, on tiny parameters. In between, users read `optimizer.state` as tensors over mapped files.
The files themselves are `hf_zero.host.scratch`.
"""
