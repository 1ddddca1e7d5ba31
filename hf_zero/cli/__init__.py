"""The command `hf-zero`: one file a command, and `main`, which finds them.

Nothing here computes: a command reads its arguments, calls what the floors below offer, and prints. Torch is imported when a
command runs that needs it, so that `--help` is quick. `launch` starts scripts that know nothing of ZeRO: each of their
processes is `python -m hf_zero.run`.
"""
