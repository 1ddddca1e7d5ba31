"""One rank of `hf-zero plan --measure`."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_zero.bench import devices
from hf_zero.bench.processes import options, report
from hf_zero.comm.collectives import Collectives, Rows
from hf_zero.comm.ledger import Ledger
from hf_zero.comm.select import make_collectives
from hf_zero.layout import RowLayout
from hf_zero.plan.shapes import configuration

_TIMEOUT_S = 120.0
_REPEATS = 7
_STEPPED = 2**23  # elements
_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "momentum": "SGD"}


def measure_here(given: dict[str, Any]) -> list[dict[str, Any]]:
    """Join the group that the environment describes, and measure what `hf_zero.bench.rates.run` asks for, on each rank."""
    torch.set_num_threads(1)
    device = devices.join()
    ranks = range(dist.get_world_size())
    chosen = make_collectives(given["collectives"], ranks, device, _TIMEOUT_S, Ledger())
    config = configuration(given["model"])
    num_layers = config.num_hidden_layers
    one, two = (_passes(config, number, given, device) for number in (1, 2))
    layer = [max(0.0, b - a) for a, b in zip(one, two, strict=True)]
    found: dict[str, Any] = {
        "collectives": chosen.name,
        "num_layers": num_layers,
        "layer": layer,
        "rest": [max(0.0, a - b) for a, b in zip(one, layer, strict=True)],
        "step_s": _step(given["optimizer"], device),
        **_exchanges(chosen, given["sizes"]),
    }
    by_rank: list[Any] = [None] * len(ranks)
    dist.all_gather_object(by_rank, found)
    dist.barrier()
    dist.destroy_process_group()
    return by_rank


def _passes(config: Any, num_layers: int, given: dict[str, Any], device: torch.device) -> list[float]:
    """Seconds of a forward and a backward of the model with so many layers: medians."""
    from transformers import AutoModelForCausalLM

    fewer = copy.deepcopy(config)
    fewer.num_hidden_layers, fewer.use_cache = num_layers, False
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(fewer, name, None) is not None:
            setattr(fewer, name, getattr(fewer, name)[:num_layers])
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(fewer, dtype=getattr(torch, given["dtype"]))
    model = model.to(device).train()
    batch = torch.randint(config.vocab_size, (given["batch_size"], given["seq_len"]), device=device)
    seconds = []
    for _ in range(2 + _REPEATS):
        model.zero_grad()
        forward, loss = _timed(lambda: model(input_ids=batch, labels=batch).loss, device)
        backward, _ = _timed(loss.backward, device)
        seconds.append((forward, backward))
    return [statistics.median(column) for column in zip(*seconds[2:], strict=True)]


def _timed(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    devices.synchronize(device)
    start = time.perf_counter()
    made = work()
    devices.synchronize(device)
    return time.perf_counter() - start, made


def _step(name: str, device: torch.device) -> float:
    """Seconds an element, of the optimizer over float32 rows."""
    rows = nn.Parameter(torch.zeros(_STEPPED, device=device))
    rows.grad = torch.ones_like(rows)
    made: Any = getattr(torch.optim, _OPTIMIZERS[name])
    extra = {"momentum": 0.9} if name == "momentum" else {}
    optimizer = made([rows], lr=1e-3, fused=True, **extra)
    seconds = []
    for _ in range(2 + _REPEATS):
        dist.barrier()
        seconds.append(_timed(optimizer.step, device)[0])
    return statistics.median(seconds[2:]) / _STEPPED


def _exchanges(collectives: Collectives, sizes: list[int]) -> dict[str, list[list[float]]]:
    """[bytes of the whole, seconds, of these the processor's] of each kind and size: medians."""
    found: dict[str, list[list[float]]] = {"gather": [], "reduce_scatter": []}
    for num_bytes in sizes:
        numel = num_bytes // 4 // collectives.num_ranks * collectives.num_ranks
        layout = RowLayout((numel,), collectives.num_ranks)
        whole = torch.empty(0, device=collectives.device).set_(collectives.allocate(4 * numel, "a measurement"))
        gradient, rows = torch.ones_like(whole), whole.new_empty(layout.local_numel(collectives.rank))

        def gather(whole: torch.Tensor = whole, layout: RowLayout = layout) -> None:
            collectives.gather([Rows(whole, layout)], "a measurement").wait()

        def reduce(gradient: torch.Tensor = gradient, rows: torch.Tensor = rows, layout: RowLayout = layout) -> None:
            collectives.reduce_scatter([Rows(gradient, layout)], [rows], "a measurement").wait()
            collectives.settle()

        for kind, work in (("gather", gather), ("reduce_scatter", reduce)):
            runs = [_exchange(collectives, work) for _ in range(2 + _REPEATS)]
            seconds, busy = (statistics.median(column) for column in zip(*runs[2:], strict=True))
            found[kind].append([4 * numel, seconds, busy])
    return found


def _exchange(collectives: Collectives, work: Callable[[], None]) -> tuple[float, float]:
    collectives.meet("a measurement")
    start, before = time.perf_counter(), time.process_time()
    work()
    if collectives.device.type != "cpu":
        devices.synchronize(collectives.device)
    return time.perf_counter() - start, time.process_time() - before


if __name__ == "__main__":
    report({"ranks": measure_here(options())})
