"""How bytes move between ranks: one seam, `Collectives`, and its implementations.

Nothing here knows what a model, a unit or a stage is: an exchange gets tensors and says when they may be read.

- `collectives`: the seam. What every implementation must provide, and what all of them share.
- `agreements`: messages between two ranks, and what all of them agree upon; `roll_call`: who has not come, once that fails.
- `watch`: the same for exchanges that are stuck on a device, where nothing can be raised.
- `exchange`: an exchange in flight; if it fails, its `wait` names the peer and the operation.
- `axis`: which ranks exchange with each other, and the process groups that reach them.
- `alone`, `native`, `pairwise`, `host/`: the implementations.
- `select`: builds the requested implementation. `measure`: finds the fastest one for `auto`.
- `ledger`: counts what really ran.

To add an implementation, write a class beside `pairwise` and add a line to `select`.
"""
