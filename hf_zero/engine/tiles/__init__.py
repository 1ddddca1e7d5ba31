"""What acts on each token alone, computed for some tokens at a time: the head with its loss, and the blocks' MLPs.

`work` computes a function of tokens in slices, forward and backward; `put_off` is logits that nobody has computed yet, and
`rules` what is done with them; `heads` and `blocks` put these into a model.

[Note: logits put off] The logits of 128 k tokens over 128 k words take 64 GiB in float32, and a loss makes three more tensors
of that size. So a head gives a tensor that knows its shape and dtype only, `PutOff`. What acts on each token alone (a cast, a
scale, a softcap, log-probabilities) is noted down; what takes some of the tokens is taken of the head's input; what leaves
little of a token's logits (a cross entropy, an argmax, a sum over the words) is computed, for `tile_tokens` tokens at a time,
and so is its backward. Everything else gets all logits, computed at that moment. So users' code need not know.
"""
