"""One rank of `hf-zero bench calls`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from hf_zero.bench import devices
from hf_zero.bench.processes import options, report
from hf_zero.bench.step.engines import Setup, build
from hf_zero.plan.models import config_of

_WARM_UP_STEPS, _STEPS = 3, 20
_TOKENS = 8


def main() -> None:
    """Count the calls of a forward and of a backward, with one engine and one model: the fewest of several steps."""
    given = options()
    device = devices.join()
    config = config_of(given["model"])

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        config.use_cache = False
        model: nn.Module = AutoModelForCausalLM.from_config(config)
        return model.train()

    training = build(given["engine"], Setup(make_model, device, getattr(torch, given["dtype"]), 1))
    batch = torch.arange(_TOKENS, device=device)[None]
    found: list[tuple[Counter[str], Counter[str]]] = []
    for _ in range(_WARM_UP_STEPS + _STEPS):
        with training.context():
            forward, loss = _counted(lambda: training.model(input_ids=batch, labels=batch).loss)
        backward, _ = _counted(partial(training.backward, loss))
        training.step()
        found.append((forward, backward))
    fewest = [min(column, key=Counter.total) for column in zip(*found[_WARM_UP_STEPS:], strict=True)]
    report({"forward": fewest[0], "backward": fewest[1]})
    dist.barrier()
    dist.destroy_process_group()


def _counted(work: Callable[[], Any]) -> tuple[Counter[str], Any]:
    """Calls that `work` makes on this thread, by whether they are Python's and by name; and what it returns."""
    calls: Counter[str] = Counter()

    def see(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            calls[f"Python {frame.f_code.co_qualname} {frame.f_code.co_filename}:{frame.f_code.co_firstlineno}"] += 1
        elif event == "c_call":
            calls[f"C {getattr(arg, '__qualname__', arg)}"] += 1

    sys.setprofile(see)
    try:
        made = work()
    finally:
        sys.setprofile(None)
    return calls, made


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
