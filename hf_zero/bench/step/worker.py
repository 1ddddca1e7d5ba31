"""One rank of `hf-zero bench step`: trains one model with one engine, or with several in turn."""

from __future__ import annotations

import contextlib
import time

import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.bench import devices
from hf_zero.bench.processes import MemoryPeak, options, private_bytes, report
from hf_zero.bench.step.engines import Setup, Training, build
from hf_zero.bench.step.shapes import Shape

_WARM_UP_STEPS = 3  # memory is watched in these; from the second one on, all optimizer states exist


def main() -> None:
    """Train as the options of `run_ranks` say: an engine of its own in fresh processes, or several, each its own model."""
    given = options()
    device = devices.join()
    num_ranks = dist.get_world_size()
    shape = Shape(given["model"], given["checkpointing"], given["lora"], given["compiles"])
    setup = Setup(
        shape.make, device, getattr(torch, given["dtype"]), given["batch_size"], accumulation=given["accumulation"]
    )
    before = private_bytes(num_ranks)
    trained = [_Engine(name, setup, shape, given["seq_len"]) for name in given["together"]]
    with MemoryPeak(lambda: private_bytes(num_ranks)) as memory:
        for each in trained:
            for _ in range(_WARM_UP_STEPS):
                each.losses.append(_step(each.training, each.drawn()))
    peak = devices.peak_of(device) if device.type != "cpu" else memory.peak - before
    for each in trained:
        if each.training.ledger is not None:
            each.training.ledger.reset()
    for _ in range(given["rounds_in_turn"]):
        for each in trained:
            each.seconds.append(_timed(each, given["steps"], device))
    is_alone = len(trained) == 1
    report({each.name: each.found(peak if is_alone else None, given["steps"]) for each in trained})
    dist.barrier()
    dist.destroy_process_group()


class _Engine:
    """One engine with its model, its batches, and what was seen of it."""

    def __init__(self, name: str, setup: Setup, shape: Shape, seq_len: int) -> None:
        self.name, self.training, self._accumulation = name, build(name, setup), setup.accumulation
        seed = dist.get_rank() // self.training.num_alike
        self._batches = shape.batches(setup.batch_size, seq_len, seed, setup.device)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def drawn(self) -> list[dict[str, Tensor]]:
        """The micro-batches of a step."""
        return [next(self._batches) for _ in range(self._accumulation)]

    def found(self, peak: int | None, steps: int) -> dict[str, object]:
        """For the report: seconds of a step by round, bytes moved a step, and the losses of all steps."""
        ledger = self.training.ledger
        moved = None if ledger is None else ledger.total().bytes / (steps * len(self.seconds))
        return {"seconds": self.seconds, "peak_bytes": peak, "moved_bytes": moved, "losses": self.losses}


def _timed(engine: _Engine, num_steps: int, device: torch.device) -> float:
    """Seconds per step, from all ranks ready to all ranks done."""
    batches = [engine.drawn() for _ in range(num_steps)]
    _synchronise(device)
    start = time.perf_counter()
    found = [_step(engine.training, batch) for batch in batches]
    _synchronise(device)
    seconds = (time.perf_counter() - start) / num_steps
    engine.losses += found
    return seconds


def _synchronise(device: torch.device) -> None:
    devices.synchronize(device)
    dist.barrier()


def _step(training: Training, batches: list[dict[str, Tensor]]) -> float:
    """The loss, as a mean over the micro-batches."""
    losses = []
    for number, batch in enumerate(batches, 1):
        is_last = number == len(batches)
        with contextlib.nullcontext() if is_last else training.no_sync():
            with training.context():
                loss = training.model(**batch).loss
            training.backward(loss)
        losses.append(loss.detach())
        if not is_last:
            training.between()
    training.step()
    return float(sum(losses)) / len(losses)


if __name__ == "__main__":
    main()
