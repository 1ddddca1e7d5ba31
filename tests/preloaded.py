"""What the ranks of tests are forked with, see `tests.ranks`: imports that take seconds. None of them starts a thread."""

import gc
import os
import sys

gc.disable()

import torch  # noqa: E402
import transformers  # noqa: E402, F401

import tests.ranks  # noqa: E402, F401

torch.set_num_threads(1)
gc.freeze()  # collections between jobs then skip what the imports made
gc.enable()
if sys.platform == "linux":
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the other threads"
