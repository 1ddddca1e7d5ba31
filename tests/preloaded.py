"""What the ranks of tests are forked with, see `tests.ranks`: imports that take seconds."""

import gc
import os
import sys
from pathlib import Path

gc.disable()

import accelerate  # noqa: E402, F401
import datasets  # noqa: E402, F401
import peft  # noqa: E402, F401
import torch  # noqa: E402
import transformers.trainer  # noqa: E402, F401
import trl  # noqa: E402, F401

import hf_zero.integrations.accelerate.accelerator  # noqa: E402
import hf_zero.integrations.trainer.arguments  # noqa: E402, F401
import tests.ranks  # noqa: E402, F401

torch.set_num_threads(1)
gc.freeze()  # collections between jobs then skip what the imports made
gc.enable()
if sys.platform == "linux":
    others = [task for task in os.listdir("/proc/self/task") if int(task) != os.getpid()]
    threads = {Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in others}
    threads.discard("jemalloc_bg_thd")  # which jemalloc starts again after a fork
    assert not threads, f"a fork would lose {threads}"
