"""Exchanges of ranks that share a host's memory (CPU, Linux on x86-64).

- `memory`: what the operating system gives: anonymous shared memory, and reading a peer's pages.
- `board`: a shared page a rank, on which ranks tell each other how far they are.
- `one_host`: `collectives: host` where all ranks are on one host; `many_hosts`: where they are on several.
"""
