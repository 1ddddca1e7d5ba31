"""One arithmetic of memory, traffic and time: for `hf-zero plan`, before anything runs, and for the summary at the start.

Shapes come from the model on the meta device, units and layouts from the engine's own code, so what is predicted is what the
engine does. Activations are counted in a forward on tensors without values. `models` are the sizes that benchmarks and plans
know by name.
"""
