"""Exchanges of ranks that share a host's memory (CPU, Linux on x86-64).

- `memory`: what the operating system provides: anonymous shared memory, and reading a peer's pages.
- `board`: one shared board per rank, on which ranks tell each other how far they are.
- `one_host`: `collectives: host`.
"""
