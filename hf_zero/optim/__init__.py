"""Optimizers' steps. The optimizer is the user's own; it never learns that its parameters are rows.

`optimizers` hears of every step through torch's global hooks. Which kind of optimizer it is (elementwise, or one that needs
whole matrices) decides who steps on what, and an unknown class is tried on tiny parameters first, so that none silently becomes
another algorithm. `offloaded/` steps on what is not on the device. Loss scaling for float16 is here too, since it decides
whether a step happens at all.
"""
