"""Checkpoints without ranks, for the command line: what a folder holds, whether its bytes are right, and its export.

One process reads a few mebibytes at a time, so a checkpoint may be larger than memory.
"""
