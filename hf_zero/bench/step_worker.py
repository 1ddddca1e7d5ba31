"""One rank of `hf-zero bench step`: trains one model with one engine."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hf_zero.bench.engines import Setup, Training, build
from hf_zero.bench.models import config_of
from hf_zero.bench.processes import MemoryPeak, options, private_bytes, report

_WARM_UP_STEPS = 3  # memory is watched in these; from the second one on, all optimizer states exist


def main() -> None:
    """Train one model with one engine, as the options of `run_ranks` say."""
    given = options()
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    config = config_of(given["model"])

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        config.use_cache = False
        model: nn.Module = AutoModelForCausalLM.from_config(config)
        if given["checkpointing"]:
            model.gradient_checkpointing_enable()  # type: ignore[operator]
        return model.train()

    setup = Setup(make_model, device, getattr(torch, given["dtype"]), given["batch_size"])
    before = private_bytes(num_ranks)
    training = build(given["engine"], setup)
    seed = rank // training.tensor_size
    batches = _batches(config.vocab_size, given["batch_size"], given["seq_len"], seed, device)
    losses = []
    with MemoryPeak(lambda: private_bytes(num_ranks)) as memory:
        for _ in range(_WARM_UP_STEPS):
            losses.append(_step(training, next(batches)))
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else memory.peak - before
    if training.ledger is not None:
        training.ledger.reset()
    seconds = _timed(training, [next(batches) for _ in range(given["steps"])], losses)
    moved = None if training.ledger is None else training.ledger.total().bytes / given["steps"]
    report({"seconds": seconds, "peak_bytes": peak, "moved_bytes": moved, "losses": losses})
    dist.barrier()
    dist.destroy_process_group()


def _timed(training: Training, batches: list[Tensor], losses: list[float]) -> float:
    """Seconds per step, from all ranks ready to all ranks done."""
    _synchronise()
    start = time.perf_counter()
    found = [_step(training, batch) for batch in batches]
    _synchronise()
    seconds = (time.perf_counter() - start) / len(batches)
    losses += found
    return seconds


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def _step(training: Training, batch: Tensor) -> float:
    with training.context():
        loss = training.model(input_ids=batch, labels=batch).loss
    training.backward(loss)
    training.step()
    return float(loss.detach())


def _batches(vocabulary: int, batch_size: int, seq_len: int, seed: int, device: torch.device) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(vocabulary, (batch_size, seq_len), generator=generator).to(device)


if __name__ == "__main__":
    main()
