"""Sequence parallelism for causal language models of transformers; see [Note: sequence axis].

`model` slices what a model is given and adds up its loss. `attention` swaps slices for whole sequences around attention, with
masks of all tokens. `checks` refuses what computes across tokens elsewhere.
"""
