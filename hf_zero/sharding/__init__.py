"""How a model comes to be partitioned.

- `shard_model`: partitions a model that is whole on every rank; also the late engine of one that was partitioned before.
- `init`: models are partitioned while they are made (`zero.Init`). `construct` cuts parameters as they are registered
  (`whole_window`: those that are whole for a moment), `loading` lets `from_pretrained` read only a rank's rows.
- `model_methods`: what is attached to a model, so that transformers and accelerate treat it as what it is.
"""
