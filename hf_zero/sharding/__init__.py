"""How a model comes to be partitioned.

- `shard_model`: a model that stands whole on every rank; and the late engine of one that was partitioned before.
- `init`: models are partitioned while they are made (`zero.Init`): `construct` cuts each module after its constructor,
  `loading` lets `from_pretrained` read only a rank's rows.
- `model_methods`: what is put on a model, so that transformers and accelerate treat it as what it is.
"""
