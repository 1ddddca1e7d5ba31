"""ZeroAccelerator in a custom loop, against one process that accumulates the ranks' batches."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate import DistributedDataParallelKwargs
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DDPCommunicationHookType
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import hf_zero as zero
from tests.models import CASES, LENGTH, VOCAB, make_model
from tests.ranks import run_alone, run_ranks

CASE = CASES["llama"]
NUM_ROWS, BATCH, RANKS = 24, 2, 2

Optimizer = torch.optim.Optimizer


def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCAB, (NUM_ROWS, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


@dataclass(frozen=True)
class Loop:
    """A training loop.

    Attributes:
        order: how `prepare` is called.
        stage: of the plugin.
        micro_batches: accumulated in a step.
        max_norm: gradients are clipped to it; 0: they are not.
        is_warm: the optimizer has stepped before it is prepared.
        mixed_precision: of accelerate.
    """

    order: str = "model_first"
    stage: int = 3
    micro_batches: int = 1
    max_norm: float = 0.5
    is_warm: bool = False
    mixed_precision: str = "no"


@dataclass
class Result:
    """What a loop leaves: losses (mean over the ranks) and norms by step, weights, the last learning rate."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    rate: float


def make_parts(loop: Loop) -> tuple[nn.Module, Optimizer, LambdaLR]:
    model = make_model(CASE)
    decayed = [param for param in model.parameters() if param.ndim > 1]
    others = [param for param in model.parameters() if param.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    if loop.is_warm:
        CASE.loss(model, CASE.batch(0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def prepare(accelerator: accelerate.Accelerator, order: str, *parts: Any) -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, loader and scheduler, prepared in one of five orders."""
    model, optimizer, loader, scheduler = parts
    if order == "model_first":
        return accelerator.prepare(model, optimizer, loader, scheduler)
    if order == "optimizer_first":
        scheduler, optimizer, loader, model = accelerator.prepare(scheduler, optimizer, loader, model)
    elif order == "apart_model_first":
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
        loader, scheduler = accelerator.prepare(loader, scheduler)
    elif order == "apart_optimizer_first":
        optimizer = accelerator.prepare(optimizer)
        loader, scheduler = accelerator.prepare(loader, scheduler)
        model = accelerator.prepare(model)
    else:
        scheduler = accelerator.prepare_scheduler(scheduler)
        loader = accelerator.prepare_data_loader(loader)
        model = accelerator.prepare_model(model)
        optimizer = accelerator.prepare_optimizer(optimizer)
    return model, optimizer, loader, scheduler


def make_accelerator(loop: Loop, **options: Any) -> zero.ZeroAccelerator:
    plugin = zero.ZeroPlugin(stage=loop.stage, collectives="pairwise")
    return zero.ZeroAccelerator(
        zero_plugin=plugin,
        gradient_accumulation_steps=loop.micro_batches,
        mixed_precision=loop.mixed_precision,
        **options,
    )


def train(loop: Loop, folder: str = "") -> Result:
    accelerator = make_accelerator(loop)
    model, optimizer, scheduler = make_parts(loop)
    loader = DataLoader(rows(), batch_size=BATCH)
    model, optimizer, loader, scheduler = prepare(accelerator, loop.order, model, optimizer, loader, scheduler)
    losses, norms = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients and loop.max_norm:
                norm = accelerator.clip_grad_norm_(model.parameters(), loop.max_norm)
                assert not isinstance(norm, DTensor)
                norms.append(norm.item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    assert type(accelerator.unwrap_model(model)) is type(make_model(CASE))
    weights = accelerator.get_state_dict(model)  # on every rank
    if folder:
        accelerator.save_model(model, folder)
    rate = optimizer.param_groups[0]["lr"]
    return Result(losses, norms, {name: value.clone() for name, value in weights.items()}, rate)


def oracle(loop: Loop) -> Result:
    """One process: the ranks' batches one after the other, each loss divided by their number."""
    model, optimizer, scheduler = make_parts(loop)
    data, losses, norms = rows(), [], []
    batches = [torch.utils.data.default_collate(data[i : i + BATCH]) for i in range(0, NUM_ROWS, BATCH)]
    rounds = [batches[i : i + RANKS] for i in range(0, len(batches), RANKS)]
    for number, batches_of_ranks in enumerate(rounds, start=1):
        values = []
        for batch in batches_of_ranks:
            loss = model(**batch).loss
            (loss / RANKS / loop.micro_batches).backward()
            values.append(loss.item())
        losses.append(sum(values) / RANKS)
        if number % loop.micro_batches and number != len(rounds):
            continue
        if loop.max_norm:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), loop.max_norm).item())
        optimizer.step()
        for _ in range(RANKS):  # accelerate's scheduler goes as many steps as there are ranks
            scheduler.step()
        optimizer.zero_grad()
    return Result(losses, norms, model.state_dict(), optimizer.param_groups[0]["lr"])


def compare(found: Result, wanted: Result, tolerance: float = 2e-6, weight_tolerance: float | None = 1e-5) -> None:
    assert found.losses == pytest.approx(wanted.losses, rel=tolerance)
    assert found.norms == pytest.approx(wanted.norms, rel=10 * tolerance)
    assert found.rate == pytest.approx(wanted.rate)
    assert found.weights.keys() == wanted.weights.keys()
    for name, value in wanted.weights.items():
        assert value.shape == found.weights[name].shape
        if weight_tolerance is not None:
            assert (found.weights[name] - value).abs().max() <= weight_tolerance, name


LOOPS = [
    *(Loop(stage=stage) for stage in (0, 1, 2, 3)),
    *(Loop(order, 3) for order in ("optimizer_first", "apart_model_first", "apart_optimizer_first", "methods")),
    Loop("optimizer_first", 1),
    Loop("apart_optimizer_first", 2),
    *(Loop("model_first", stage, is_warm=True) for stage in (0, 2, 3)),
    Loop("apart_optimizer_first", 3, is_warm=True),
    Loop("methods", 1, is_warm=True),
    *(Loop(stage=stage, micro_batches=2) for stage in (0, 1, 2, 3)),
    Loop(stage=3, micro_batches=4, max_norm=0.0),
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: "-".join(str(value) for value in vars(loop).values()))
def test_loop_equals_one_process(loop: Loop) -> None:
    wanted = run_alone(oracle, loop)
    for found in run_ranks(train, RANKS, loop):
        compare(found, wanted)


@pytest.mark.parametrize("stage", [1, 3])
def test_bf16_is_close_to_one_process_in_fp32(stage: int) -> None:
    loop = Loop(stage=stage, mixed_precision="bf16")
    wanted = run_alone(oracle, loop)
    for found in run_ranks(train, RANKS, loop):
        compare(found, wanted, tolerance=1e-2, weight_tolerance=None)
        assert {value.dtype for value in found.weights.values()} == {torch.float32}
        assert found.losses != wanted.losses


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_saved_model_is_what_the_ranks_hold(stage: int, tmp_path: Path) -> None:
    found = run_ranks(train, RANKS, Loop(stage=stage), str(tmp_path))[0]
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == found.weights.keys()
    assert all(torch.equal(saved[name], value) for name, value in found.weights.items())
    make_model(CASE).load_state_dict(saved)


# ---- parts of a loop ------------------------------------------------------------------------------------------------


def sync_by_hand(stage: int) -> list[Tensor]:
    """Two micro-batches, the first within no_sync, the second outside."""
    loop = Loop(stage=stage)
    accelerator = make_accelerator(loop)
    model, optimizer, _ = make_parts(loop)
    model, optimizer = accelerator.prepare(model, optimizer)
    for micro in range(2):
        batch = CASE.batch(0, dist.get_rank(), micro)
        if micro == 0:
            with accelerator.no_sync(model):
                accelerator.backward(CASE.loss(model, batch))
        else:
            accelerator.backward(CASE.loss(model, batch))
    params = list(model.parameters())
    return [param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad.clone() for param in params]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_sync_accumulates(stage: int) -> None:
    model = make_model(CASE)
    for rank in range(RANKS):
        for micro in range(2):
            (CASE.loss(model, CASE.batch(0, rank, micro)) / RANKS).backward()
    for found in run_ranks(sync_by_hand, RANKS, stage):
        for grad, param in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(grad, param.grad, rtol=1e-5, atol=1e-7)


def prepare_a_teacher() -> dict[str, bool]:
    accelerator = make_accelerator(Loop())
    teacher = make_model(CASE).requires_grad_(False)
    evaluated, (model, optimizer, _) = make_model(CASE), make_parts(Loop())
    teacher, model, optimizer = accelerator.prepare(teacher, model, optimizer)
    evaluated = accelerator.prepare_model(evaluated.requires_grad_(False), evaluation_mode=True)
    batch = CASE.batch(0, dist.get_rank())
    accelerator.backward(CASE.loss(model, batch) + 0 * CASE.loss(teacher, batch))
    optimizer.step()
    whole = accelerator.get_state_dict(teacher)
    return {
        "teacher_is_left_alone": zero.engine_of(teacher) is None and is_plain(teacher),
        "evaluated_is_left_alone": zero.engine_of(evaluated) is None and is_plain(evaluated),
        "model_is_cut": not is_plain(model),
        "state": all(torch.equal(whole[name], value) for name, value in teacher.state_dict().items()),
    }


def is_plain(model: nn.Module) -> bool:
    return not any(isinstance(param, DTensor) for param in model.parameters())


def test_models_without_trainable_parameters_are_left_alone() -> None:
    for found in run_ranks(prepare_a_teacher, RANKS):
        assert all(found.values()), found


def two_models() -> list[bool]:
    """Two models and two optimizers, as in adversarial training."""
    accelerator = make_accelerator(Loop(stage=2))
    pairs = [make_parts(Loop())[:2] for _ in range(2)]
    (first, second), (first_optimizer, second_optimizer) = zip(*pairs, strict=True)
    prepared = accelerator.prepare(first_optimizer, first, second, second_optimizer)
    first_optimizer, first, second, second_optimizer = prepared
    batch = CASE.batch(0, dist.get_rank())
    before = [{n: v.clone() for n, v in accelerator.get_state_dict(m).items()} for m in (first, second)]
    accelerator.backward(CASE.loss(first, batch))
    first_optimizer.step()
    after = [accelerator.get_state_dict(model) for model in (first, second)]
    return [
        all(torch.equal(new[name], value) for name, value in old.items())
        for old, new in zip(before, after, strict=True)
    ]


def test_each_optimizer_follows_its_own_model() -> None:
    for found in run_ranks(two_models, RANKS):
        assert found == [False, True]


def accelerate_by_variable(path: str) -> tuple[int, str, bool]:
    os.environ["HF_ZERO_CONFIG"] = path
    accelerator = zero.ZeroAccelerator(mixed_precision="bf16")
    model = accelerator.prepare(make_model(CASE))
    engine = zero.engine_of(model)
    assert engine is not None
    return engine.world.config.stage, engine.world.config.compute_dtype, is_plain(model)


def test_the_variable_names_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "zero.yaml"
    path.write_text("stage: 2\ncollectives: pairwise\n")
    assert run_ranks(accelerate_by_variable, RANKS, str(path)) == [(2, "bfloat16", False)] * RANKS


# ---- what is refused ------------------------------------------------------------------------------------------------


def refused(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def refuse_all() -> dict[str, tuple[str, str]]:
    accelerator = make_accelerator(Loop())
    model, optimizer, _ = make_parts(Loop())
    _, strange, _ = make_parts(Loop())
    errors = {"strange_optimizer": refused(lambda: accelerator.prepare(model, strange))}
    accelerator.prepare(model, optimizer)
    CASE.loss(model, CASE.batch(0, dist.get_rank())).backward()
    errors["mistake"] = refused(lambda: zero.ZeroPlugin(stage=4))
    plugin = zero.ZeroPlugin(stage=1)
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    errors["comm_hook"] = refused(lambda: zero.ZeroAccelerator(zero_plugin=plugin, kwargs_handlers=[hook]))
    return errors


def test_refusals_are_errors_on_all_ranks() -> None:
    first, second = run_ranks(refuse_all, RANKS)
    assert first == second
    words = {
        "strange_optimizer": ("PartitionError", "belongs to no prepared model"),
        "mistake": ("ConfigError", "stage"),
        "comm_hook": ("ConfigError", "comm_hook='bf16' of DistributedDataParallelKwargs belongs to DDP"),
    }
    assert first.keys() == words.keys()
    for name, (kind, text) in words.items():
        assert first[name][0] == kind, (name, first[name])
        assert text in first[name][1], (name, first[name])


def options_of_ddp() -> list[bool]:
    options: list[list[Any]] = [
        [],
        [DistributedDataParallelKwargs()],
        [DistributedDataParallelKwargs(broadcast_buffers=False)],
    ]
    found = []
    for handlers in options:
        accelerator = zero.ZeroAccelerator(zero_plugin=zero.ZeroPlugin(stage=1), kwargs_handlers=handlers)
        model = accelerator.prepare(make_model(CASE))
        found.append(zero.engine_of(model).world.config.broadcast_buffers)  # type: ignore[union-attr]
    return found


def test_buffers_are_broadcast_unless_ddps_options_say_not_to() -> None:
    assert run_ranks(options_of_ddp, RANKS) == [[True, True, False]] * RANKS


def clip_by_the_largest() -> list[float]:
    accelerator = make_accelerator(Loop())
    model, optimizer, _ = make_parts(Loop())
    model, optimizer = accelerator.prepare(model, optimizer)
    CASE.loss(model, CASE.batch(0, dist.get_rank())).backward()

    def largest() -> float:
        return max(p.grad.detach().full_tensor().abs().max().item() for p in model.parameters() if p.grad is not None)

    before = largest()
    norm = accelerator.clip_grad_norm_(model.parameters(), before / 2, float("inf"))
    return [before, norm.item(), 2 * largest()]


def test_infinite_norm_is_that_of_all_rows_on_every_rank() -> None:
    for before, norm, after in run_ranks(clip_by_the_largest, RANKS):
        assert norm == before
        assert after == pytest.approx(before, rel=1e-4)


def train_alone_with_accelerate(is_ours: bool) -> list[float]:
    random.seed(0)
    plugin = {"zero_plugin": zero.ZeroPlugin(stage=3)} if is_ours else {}
    accelerator = (zero.ZeroAccelerator if is_ours else accelerate.Accelerator)(**plugin)
    model, optimizer, scheduler = make_parts(Loop())
    loader = DataLoader(rows(), batch_size=BATCH)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_one_process_trains_as_under_a_plain_accelerator() -> None:
    assert run_alone(train_alone_with_accelerate, True) == run_alone(train_alone_with_accelerate, False)


def train_locally(stage: int) -> dict[str, Tensor] | str:
    accelerator = make_accelerator(Loop(stage=stage))
    model = make_model(CASE)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    try:
        with LocalSGD(accelerator, model, local_sgd_steps=2) as local:
            for step in range(4):
                accelerator.backward(CASE.loss(model, CASE.batch(step, accelerator.process_index)))
                optimizer.step()
                optimizer.zero_grad()
                local.step()
    except zero.UsageError as error:
        return str(error)
    return {name: param.detach() for name, param in model.named_parameters()}


def average_locally() -> dict[str, Tensor]:
    models = [make_model(CASE) for _ in range(RANKS)]
    for step in range(4):
        for rank, model in enumerate(models):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            CASE.loss(model, CASE.batch(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step % 2:
            for params in zip(*(model.parameters() for model in models), strict=True):
                mean = sum(param.data for param in params) / RANKS
                for param in params:
                    param.data = mean.clone()
    return {name: param.detach() for name, param in models[0].named_parameters()}


def test_local_sgd_is_that_of_plain_where_nothing_is_partitioned_and_an_error_elsewhere() -> None:
    wanted = run_alone(average_locally)
    for found in run_ranks(train_locally, RANKS, 0):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, msg=name)
    for stage in (1, 3):
        assert all("use stage 0, or gradient accumulation" in text for text in run_ranks(train_locally, RANKS, stage))
