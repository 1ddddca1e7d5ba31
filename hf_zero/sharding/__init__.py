"""How a model comes to be partitioned, and what it carries from then on.

Three doors lead in: `shard_model` cuts a model that is whole, `Init` cuts models as they are loaded or constructed, and
`activate` does so for a whole program. A model made by the latter two gets its engine late, at its first forward or from
`shard_model`, so that adapters or a new head can still be added. Everything that is changed in another library on the way is
one of `hf_zero.changes`, which `zero.undo()` puts back.
"""
