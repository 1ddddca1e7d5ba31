"""Exchanges that need no shared memory.

- `pairwise`: `collectives: pairwise`, for CPU ranks on any hosts: every two ranks exchange directly.
- `native`: `collectives: native`, the process group's own collectives, as on GPUs.
- `wire`: what the wire formats of `config.wire` make of the bytes of either.
"""
