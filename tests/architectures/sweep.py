"""Every model type of transformers' registry, partitioned over two ranks, beside the unsharded model.

Run `python -m tests.architectures.sweep` for a table of all of them; `--help` names the choices.
"""

import argparse
import copy
import json
import os
import signal
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub is imported, which reads them once
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero as zero
from tests.architectures.build import CannotBuildError, TinyModel, build, forward, loss_of, model_types, tensors
from tests.architectures.inputs import Inputs
from tests.engine.twins import whole
from tests.ranks import RankError, RankFailure, close_pool, run_alone, run_ranks

NUM_RANKS, STEPS, PLAIN_S, SHARDED_S = 2, 2, 20.0, 60.0
LEARNING_RATES = (0.1, 0.01, 0.001, 0.0001)

# Two ranks add gradients in another order than one process does: one rounding, some 1e-7 of a value. Two steps and a
# dozen layers make it larger, and a value that is small beside the others of its tensor carries their rounding.
RELATIVE, ABSOLUTE = 1e-4, 1e-5


@dataclass
class Row:
    """What became of one model type: its class or why there is none, and by stage "ok" or what went wrong."""

    model_type: str
    model_class: str = ""
    reason: str = ""
    stages: dict[int, str] = field(default_factory=dict)


def plain(model_type: str) -> tuple[str, str]:
    """(class, ""), or ("", reason) where no model of this type trains without sharding."""
    torch.set_num_threads(1)
    before = signal.signal(signal.SIGALRM, _too_slow)
    signal.setitimer(signal.ITIMER_REAL, PLAIN_S)
    try:
        tiny = build(model_type)
        try:
            _learning_rate(tiny)
        except (CannotBuildError, TooSlowError):
            raise
        except Exception as error:  # such as of a type whose evaluation takes other inputs
            raise CannotBuildError(f"it does not run unsharded: {type(error).__name__}: {error}") from error
        return type(tiny.model).__name__, ""
    except (CannotBuildError, TooSlowError) as error:
        return "", str(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _too_slow(*_: Any) -> None:
    raise TooSlowError(f"it takes longer than {PLAIN_S:g} s")


class TooSlowError(BaseException):
    """Raised by the alarm; no `except Exception` on the way may swallow it."""


def check(model_type: str, stage: int) -> str:
    """Train a model on this rank's and the others' inputs, partitioned and not: "ok", or the first difference.

    To be called on all ranks. What the partitioned model raises is raised.
    """
    tiny = build(model_type)
    lr = _learning_rate(tiny)
    model, reference = tiny.model, copy.deepcopy(tiny.model)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    inputs = [[tiny.inputs(_seed(step, each)) for each in range(num_ranks)] for step in range(STEPS + 1)]
    dist.barrier()  # a rank that is late with its imports must not use up the others' patience
    engine = zero.shard_model(
        model, zero.ZeroConfig(stage=stage, prefetch_bytes=0, collectives="pairwise", timeout_s=20)
    )
    optimizers = [torch.optim.SGD(_trained(each), lr=lr) for each in (model, reference)]
    for step in range(STEPS):
        loss_of(forward(model, inputs[step][rank], step)).backward()
        _backward_all(reference, inputs[step], step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    outputs = [_evaluate(each, inputs[STEPS][rank]) for each in (model, reference)]
    params = [_whole_params(each) for each in (model, reference)]
    engine.close()
    return _first_difference(params[0], params[1]) or _first_difference(outputs[0], outputs[1]) or "ok"


def _seed(step: int, rank: int) -> int:
    return 1 + 100 * step + rank


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def _backward_all(model: nn.Module, inputs: list[Inputs], step: int) -> None:
    """Gradients of all ranks' batches; buffers (running means) become those that rank 0's batch leaves, as under DDP."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for each in reversed(range(len(inputs))):
        for name, buffer in model.named_buffers():
            if name in buffers and buffer.shape == buffers[name].shape:
                buffer.copy_(buffers[name])
        (loss_of(forward(model, inputs[each], step)) / len(inputs)).backward()


def _evaluate(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    model.eval()
    with torch.no_grad():
        output = forward(model, inputs, STEPS)
    return {f"output {index}": tensor for index, tensor in enumerate(tensors(output))}


def _whole_params(model: nn.Module) -> dict[str, Tensor]:
    with torch.no_grad():
        return {name: whole(param).clone() for name, param in model.named_parameters()}


def _first_difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    """The first tensor that is not the same within the tolerance, which is relative to the largest value of each."""
    if actual.keys() != expected.keys():
        return f"other names: {sorted(actual.keys() ^ expected.keys())[:3]}"
    for name, right in expected.items():
        left = actual[name]
        if left.shape != right.shape:
            return f"{name}: shape {tuple(left.shape)}, expected {tuple(right.shape)}"
        is_odd = ~right.isfinite()
        if not torch.equal(~left.isfinite(), is_odd):
            return f"{name}: other values are not finite"
        error = (left - right).masked_fill(is_odd, 0).abs()
        largest = right.masked_fill(is_odd, 0).abs()
        if error.numel() and error.max() > ABSOLUTE + RELATIVE * largest.max():
            return f"{name}: off by {error.max():.1e} of {largest.max():.1e}"
    return ""


def _learning_rate(tiny: TinyModel) -> float:
    """The largest at which training is steady and a change of the parameters by one rounding stays one."""
    for lr in LEARNING_RATES:
        results = []
        for noise in (0.0, 1e-7):
            model = copy.deepcopy(tiny.model)
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(1 + noise * torch.randn(param.shape, generator=generator))
            optimizer = torch.optim.SGD(_trained(model), lr=lr)
            for step in range(STEPS):
                _backward_all(model, [tiny.inputs(_seed(step, rank)) for rank in range(NUM_RANKS)], step)
                optimizer.step()
                optimizer.zero_grad()
            results.append(_whole_params(model) | _evaluate(model, tiny.inputs(_seed(STEPS, 0))))
        difference = _first_difference(results[1], results[0])
        if not difference and all(param.isfinite().all() for param in model.parameters()):
            return lr
    raise CannotBuildError(f"training makes a rounding large: {difference}")


def sweep(types: Iterable[str], stages: list[int]) -> Iterable[Row]:
    """One row for each type, as soon as it is known; what one type does to its ranks does not reach the next."""
    for model_type in types:
        row = Row(model_type)
        try:
            row.model_class, row.reason = run_alone(plain, model_type, timeout_s=2 * PLAIN_S)
        except RankError as error:
            row.reason = _first_line(error.failures[0])
        if row.model_class:
            row.stages = {stage: outcome(model_type, stage) for stage in stages}
        yield row


def outcome(model_type: str, stage: int) -> str:
    """ "ok", or what went wrong first on any of the ranks."""
    try:
        results = run_ranks(check, NUM_RANKS, model_type, stage, expect_failure=True, timeout_s=SHARDED_S)
    except RankError as error:
        return _first_line(error.failures[0])
    failures = [result for result in results if isinstance(result, RankFailure)]
    if failures:
        return _first_line(min(failures, key=lambda failure: failure.failed_at_s))
    return next((result for result in results if result != "ok"), "ok")


def _first_line(failure: RankFailure) -> str:
    return f"{failure.type_name}: {(failure.message.strip().splitlines() or [''])[0]}"[:200]


def main() -> None:
    """Print a table of all model types; the exit code is 1 if a type that trains unsharded does not train sharded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", default="1,3", help="comma-separated; default: %(default)s")
    parser.add_argument("--only", default="", help="comma-separated model types; default: all")
    parser.add_argument("--json", type=Path, help="write the rows there, one line each")
    arguments = parser.parse_args()
    stages = [int(stage) for stage in arguments.stages.split(",")]
    types = arguments.only.split(",") if arguments.only else model_types()
    rows: list[Row] = []
    try:
        for row in sweep(types, stages):
            rows.append(row)
            print(_line(row), flush=True)
            if arguments.json:
                with arguments.json.open("a" if len(rows) > 1 else "w") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
    finally:
        close_pool()
    built = [row for row in rows if row.model_class]
    print(f"{len(rows)} types, {len(built)} train unsharded")
    for stage in stages:
        print(f"stage {stage}: {sum(row.stages[stage] == 'ok' for row in built)} of {len(built)} are the same")
    sys.exit(any(text != "ok" for row in built for text in row.stages.values()))


def _line(row: Row) -> str:
    if not row.model_class:
        return f"{row.model_type:32} - {row.reason}"
    outcomes = "  ".join(f"stage {stage}: {text}" for stage, text in row.stages.items())
    return f"{row.model_type:32} {row.model_class:44} {outcomes}"


if __name__ == "__main__":
    from tests.architectures import sweep as importable  # the ranks find its functions by this name

    importable.main()
