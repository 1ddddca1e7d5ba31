"""What is hung on a model's modules, so that its own code needs no change.

`hooks` is the way in: a module's call begins and ends, and the engine makes its unit whole in between. The others each change
one habit of modules: which of them compute in float32 all the same, which methods besides `forward` gather, where inputs of
recomputed layers are kept, and what `state_dict` and `load_state_dict` show and take. All of it comes off again when the engine
is closed.
"""
