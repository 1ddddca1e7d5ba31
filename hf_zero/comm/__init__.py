"""How bytes move between ranks: one seam, `Collectives`, and its implementations.

Nothing here knows what a model, a unit or a stage is: an exchange gets tensors and says when they may be read.

- `collectives`: the seam. What an implementation has to offer, and what all of them share.
- `exchange`: one exchange under way; its `wait` names the peer and the operation when it fails.
- `native`, `pairwise`, `host/`: the implementations.
- `select` makes the one that was asked for; `measure` finds the fastest for `auto`.
- `ledger`: counts what really ran.

A new exchange is a class beside `pairwise`, and a line in `select`.
"""
