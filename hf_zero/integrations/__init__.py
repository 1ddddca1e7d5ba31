"""Where other libraries meet the engine: `accelerate/` for custom loops, `trainer/` for the transformers Trainer,
`everywhere` for scripts that know nothing of ZeRO.

Below them, only `sharding` (loading) and `checkpoint` (exporting) know transformers; nothing knows accelerate.
"""
