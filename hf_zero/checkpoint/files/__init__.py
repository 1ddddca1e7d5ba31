"""What lies on a disk: safetensors files, manifests, and which bytes of a rank go where.

Which bytes a tensor's rows become is learnt from a run on meta tensors, so it holds for whatever the model's own saving does to
them. Every change on the disk is one function of `disk`, which a test can make fail. Nothing here talks to another rank.
"""
