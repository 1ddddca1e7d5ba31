"""ZeRO in the plain transformers Trainer, by one argument.

- `arguments`: `ZeroTrainingArguments`, `with_zero` and `ZeroCallback`.
- `patch`: the methods of the Trainer that are replaced; the only file to open for a new release of transformers.
- `checkpoint`: what those methods do to save and resume; `signals`: saves that a signal asks for.
"""
