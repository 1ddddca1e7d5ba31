"""DeepSpeed's JSON in our terms.

`translate` is the way in. A table of keys says for each what becomes of it: a key of ours, nothing (with the reason), or an
error. What the file says about training (optimizer, schedule, batch sizes) is handed to the Trainer's arguments. Every key is
read once, and one that nobody has read is an error: a translation that forgets a key would train something else.
"""
