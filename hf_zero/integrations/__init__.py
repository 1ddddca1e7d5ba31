"""Where other libraries meet the engine: `accelerate/` for custom loops, `trainer/` for the transformers Trainer.

Below them, only `sharding` (loading) and `checkpoint` (exporting) know transformers; nothing knows accelerate.
"""
