"""How bytes move between ranks: one seam, `Collectives`, and its implementations.

Nothing here knows what a model, a unit or a stage is: an exchange gets tensors and says when they may be read, and one that
fails names the peer and the operation. Start at `collectives` (what every implementation provides) and `groups/select` (the
rule by which one is taken); `agreements` has what ranks agree upon, `together` how they fail together, and the folder `beside`
what processes tell each other where not all of them take part. The ledger counts what really ran, so no byte may pass between
ranks elsewhere.
To add an implementation, write a class in `backends` and add a line to `groups/select`.
"""
