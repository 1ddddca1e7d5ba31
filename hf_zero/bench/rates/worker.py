"""One rank of `hf-zero plan --measure`."""

from __future__ import annotations

import copy
import math
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
from hf_zero.comm.exchange import Exchange
from hf_zero.comm.groups.select import make_collectives
from hf_zero.comm.ledger import Ledger
from hf_zero.layout import RowLayout
from hf_zero.plan.shapes import configuration

_TIMEOUT_S = 120.0
_REPEATS = 7
_PAIRS = 3  # of a training beside exchanges, and one alone
_BESIDE = 1.5  # times the seconds of the exchanges, so that they end within the training
_MOST_AT_ONCE = 32
_STEPPED = 2**23  # elements
_COMPUTED = 2**25  # elements of the layers that are measured beside the first
_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "momentum": "SGD"}


def measure_here(given: dict[str, Any]) -> list[dict[str, Any]]:
    """Join the group that the environment describes, and measure what `hf_zero.bench.rates.run` asks for, on each rank."""
    torch.set_num_threads(1)
    device = devices.join()
    ranks = range(dist.get_world_size())
    chosen = make_collectives(given["collectives"], ranks, device, _TIMEOUT_S, Ledger())
    config = configuration(given["model"])
    num_layers = config.num_hidden_layers
    training = _Training(config, 1, given, device)
    one, layer = _passes(training, config, given)
    found: dict[str, Any] = {
        "collectives": chosen.name,
        "num_layers": num_layers,
        "layer": layer,
        "rest": [max(0.0, a - b) for a, b in zip(one, layer, strict=True)],
        "step_s": _step(given["optimizer"], device),
        **_exchanges(chosen, given["sizes"], training),
    }
    by_rank: list[Any] = [None] * len(ranks)
    dist.all_gather_object(by_rank, found)
    dist.barrier()
    dist.destroy_process_group()
    return by_rank


class _Training:
    """The model with fewer layers, which trains without a step.

    Args:
        config: of the whole model.
        num_layers: what it has.
        given: what `hf_zero.bench.rates.run` asks for.
        device: where it computes.
    """

    def __init__(self, config: Any, num_layers: int, given: dict[str, Any], device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        fewer = copy.deepcopy(config)
        fewer.num_hidden_layers, fewer.use_cache = num_layers, False
        for name in ("layer_types", "mlp_layer_types"):
            if getattr(fewer, name, None) is not None:
                setattr(fewer, name, getattr(fewer, name)[:num_layers])
        torch.manual_seed(0)
        model: nn.Module = AutoModelForCausalLM.from_config(fewer, dtype=getattr(torch, given["dtype"]))
        self.model = model.to(device).train()
        self.batch = torch.randint(config.vocab_size, (given["batch_size"], given["seq_len"]), device=device)
        self.device = device

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(p.numel() for p in self.model.parameters())

    def once(self) -> tuple[float, float]:
        """Seconds of a forward and of a backward, which all ranks begin together."""
        self.model.zero_grad()
        dist.barrier()
        forward, loss = _timed(lambda: self.model(input_ids=self.batch, labels=self.batch).loss, self.device)
        dist.barrier()
        return forward, _timed(loss.backward, self.device)[0]

    def seconds(self, times: int) -> float:
        """Of so many forwards and backwards."""
        start = time.perf_counter()
        for _ in range(times):
            self.model.zero_grad()
            self.model(input_ids=self.batch, labels=self.batch).loss.backward()
        devices.synchronize(self.device)
        return time.perf_counter() - start


def _passes(one: _Training, config: Any, given: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Seconds of a forward and of a backward of the model with one layer, and what each other layer adds to them: medians.

    They are those of the slowest rank, for which the others of a training wait. Noise of what several layers add is divided by
    their number, so there are as many as are quickly computed; they and the one take turns, as machines slow down and recover.
    """
    two = _Training(config, 2, given, one.device)
    fitting = 1 + _COMPUTED // max(two.numel - one.numel, 1)
    number = max(2, min(config.num_hidden_layers, fitting))
    several = two if number == 2 else _Training(config, number, given, one.device)
    del two
    seconds = torch.stack([_of_the_slowest([one.once(), several.once()]) for _ in range(2 + _REPEATS)])[2:]
    of_one, more = seconds[:, 0].median(0).values, (seconds[:, 1] - seconds[:, 0]).median(0).values
    return of_one.tolist(), (more / (number - 1)).clamp(min=0).tolist()


def _of_the_slowest(seconds: Any) -> torch.Tensor:
    """The largest of all ranks, each."""
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found


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


def _exchanges(collectives: Collectives, sizes: list[int], training: _Training) -> dict[str, list[list[float]]]:
    """[bytes of the whole, seconds, what it takes from a training beside it] of each kind and size: medians."""
    found: dict[str, list[list[float]]] = {"gather": [], "reduce_scatter": []}
    for num_bytes in sizes:
        numel = num_bytes // 4 // collectives.num_ranks * collectives.num_ranks
        layout = RowLayout((numel,), collectives.num_ranks)
        whole = torch.empty(0, device=collectives.device).set_(collectives.allocate(4 * numel, "a measurement"))
        gradient, rows = torch.ones_like(whole), whole.new_empty(layout.local_numel(collectives.rank))

        def gather(whole: torch.Tensor = whole, layout: RowLayout = layout) -> Exchange:
            return collectives.gather([Rows(whole, layout)], "a measurement")

        def reduce(
            gradient: torch.Tensor = gradient, rows: torch.Tensor = rows, layout: RowLayout = layout
        ) -> Exchange:
            return collectives.reduce_scatter([Rows(gradient, layout)], [rows], "a measurement")

        for kind, begin in (("gather", gather), ("reduce_scatter", reduce)):
            seconds = statistics.median([_exchange(collectives, begin) for _ in range(2 + _REPEATS)][2:])
            taken = _taken(collectives, begin, seconds, training) if collectives.name != "host" else seconds
            found[kind].append([4 * numel, seconds, taken])
    return found


def _exchange(collectives: Collectives, begin: Callable[[], Exchange]) -> float:
    """Seconds of an exchange that nothing runs beside."""
    collectives.meet("a measurement")
    start = time.perf_counter()
    begin().wait()
    collectives.settle()
    devices.synchronize(collectives.device)
    return time.perf_counter() - start


def _taken(collectives: Collectives, begin: Callable[[], Exchange], seconds: float, training: _Training) -> float:
    """Seconds that an exchange takes from a training that goes on beside it."""
    seconds, alone = _of_the_slowest([seconds, training.seconds(1)]).tolist()
    times = math.ceil(_BESIDE * seconds / alone)
    number = max(1, min(_MOST_AT_ONCE, int(times * alone / (_BESIDE * seconds))))
    found = []
    for _ in range(_PAIRS):
        collectives.meet("a measurement")
        alone = training.seconds(times)
        collectives.meet("a measurement")
        works = [begin() for _ in range(number)]
        beside = training.seconds(times)
        for work in works:
            work.wait()
        collectives.settle()
        found.append((beside - alone) / number)
    return min(max(statistics.median(found), 0.0), seconds)


if __name__ == "__main__":
    report({"ranks": measure_here(options())})
