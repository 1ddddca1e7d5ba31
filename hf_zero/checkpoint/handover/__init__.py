"""Whole weights of a partitioned model for somebody else, such as an inference engine beside training.

- `contents`: which tensors the base model has, and which layers of adapters lie around them.
- `parts`: which tensors are gathered together, and what is handed over of them, under which names.
- `bucket`: one exchange of several parameters.
- `merging`: adapters merged into copies, a layer at a time.
- `stream`: `whole_parameters`, the iterator over all of it.
"""
