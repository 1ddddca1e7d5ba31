"""ZeroAccelerator in a custom loop, against one process that accumulates the ranks' batches."""

from __future__ import annotations

import functools
import os
import random
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate import DistributedDataParallelKwargs
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState
from accelerate.utils import DDPCommunicationHookType
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import hf_zero as zero
from hf_zero.config import files
from tests.engine.twins import STAGES, whole
from tests.integrations.refusals import refused
from tests.models import CASES, LENGTH, VOCAB, make_model
from tests.ranks import alone, by_hand, on_ranks

CASE = CASES["llama"]
NUM_ROWS, BATCH, RANKS = 16, 2, 2

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
    """One process; it knows neither the order of `prepare` nor the stage nor a mixed precision."""
    return _oracle(replace(loop, order="", stage=0, mixed_precision=""))


@functools.cache
def _oracle(loop: Loop) -> Result:
    """The ranks' batches one after the other, each loss divided by their number."""
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
    Loop(stage=2),
    *(Loop(order, 3) for order in ("optimizer_first", "apart_model_first", "methods")),
    Loop("optimizer_first", 1),
    Loop("model_first", 3, is_warm=True),
    Loop("methods", 1, is_warm=True),
    *(Loop(stage=stage, micro_batches=2) for stage in (1, 3)),
    *by_hand(
        *(Loop(stage=stage) for stage in (0, 1, 3)),
        Loop("apart_optimizer_first", 3),
        Loop("apart_optimizer_first", 2),
        *(Loop("model_first", stage, is_warm=True) for stage in (0, 2)),
        Loop("apart_optimizer_first", 3, is_warm=True),
        *(Loop(stage=stage, micro_batches=2) for stage in (0, 2)),
        Loop(stage=3, micro_batches=4, max_norm=0.0),
    ),
]


@on_ranks(RANKS, loop=LOOPS)
def test_loop_equals_one_process(loop: Loop) -> None:
    compare(train(loop), oracle(loop))


@on_ranks(RANKS, stage=[1, 3])
def test_bf16_is_close_to_one_process_in_fp32(stage: int) -> None:
    loop = Loop(stage=stage, mixed_precision="bf16")
    found, wanted = train(loop), oracle(loop)
    compare(found, wanted, tolerance=1e-2, weight_tolerance=None)
    assert {value.dtype for value in found.weights.values()} == {torch.float32}
    assert found.losses != wanted.losses


@on_ranks(RANKS, stage=[0, 2, 3])
def test_saved_model_is_what_the_ranks_hold(stage: int, tmp_path: Path) -> None:
    found = train(Loop(stage=stage), str(tmp_path / f"stage{stage}"))
    dist.barrier()
    saved = load_file(tmp_path / f"stage{stage}" / "model.safetensors")
    assert saved.keys() == found.weights.keys()
    assert all(torch.equal(saved[name], value) for name, value in found.weights.items())
    make_model(CASE).load_state_dict(saved)


@on_ranks(RANKS)
def test_joining_uneven_inputs_has_no_effect_and_says_so() -> None:
    accelerator = make_accelerator(Loop(stage=1))
    model, *_ = make_parts(Loop(stage=1))
    prepared = accelerator.prepare_model(model)
    joined = accelerator.join_uneven_inputs([prepared], even_batches=False)
    with (
        mock.patch.object(type(accelerator), "multi_device", True),  # where accelerate would join
        pytest.warns(UserWarning, match="no effect on models that hf_zero runs"),
        joined,
    ):
        pass


# ---- parts of a loop ------------------------------------------------------------------------------------------------


@on_ranks(RANKS, stage=STAGES)
def test_no_sync_accumulates(stage: int) -> None:
    """Two micro-batches, the first within no_sync, the second outside."""
    accelerator = make_accelerator(Loop(stage=stage))
    model, optimizer, _ = make_parts(Loop(stage=stage))
    model, optimizer = accelerator.prepare(model, optimizer)
    with accelerator.no_sync(model):
        accelerator.backward(CASE.loss(model, CASE.batch(0, dist.get_rank(), 0)))
    accelerator.backward(CASE.loss(model, CASE.batch(0, dist.get_rank(), 1)))
    reference = make_model(CASE)
    for rank in range(RANKS):
        for micro in range(2):
            (CASE.loss(reference, CASE.batch(0, rank, micro)) / RANKS).backward()
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(param.grad), expected.grad, rtol=1e-5, atol=1e-7)


@on_ranks(RANKS)
def test_models_without_trainable_parameters_are_left_alone() -> None:
    accelerator = make_accelerator(Loop())
    teacher = make_model(CASE).requires_grad_(False)
    evaluated, (model, optimizer, _) = make_model(CASE), make_parts(Loop())
    teacher, model, optimizer = accelerator.prepare(teacher, model, optimizer)
    evaluated = accelerator.prepare_model(evaluated.requires_grad_(False), evaluation_mode=True)
    batch = CASE.batch(0, dist.get_rank())
    accelerator.backward(CASE.loss(model, batch) + 0 * CASE.loss(teacher, batch))
    optimizer.step()
    assert zero.engine_of(teacher) is None and is_plain(teacher)
    assert zero.engine_of(evaluated) is None and is_plain(evaluated)
    assert not is_plain(model)
    state = accelerator.get_state_dict(teacher)
    assert all(torch.equal(state[name], value) for name, value in teacher.state_dict().items())


def is_plain(model: nn.Module) -> bool:
    return not any(isinstance(param, DTensor) for param in model.parameters())


@on_ranks(RANKS)
def test_each_optimizer_follows_its_own_model() -> None:
    """Two models and two optimizers, as in adversarial training."""
    accelerator = make_accelerator(Loop(stage=2))
    pairs = [make_parts(Loop())[:2] for _ in range(2)]
    (first, second), (first_optimizer, second_optimizer) = zip(*pairs, strict=True)
    prepared = accelerator.prepare(first_optimizer, first, second, second_optimizer)
    first_optimizer, first, second, second_optimizer = prepared
    before = [{n: v.clone() for n, v in accelerator.get_state_dict(m).items()} for m in (first, second)]
    accelerator.backward(CASE.loss(first, CASE.batch(0, dist.get_rank())))
    first_optimizer.step()
    for model, old, stays in zip((first, second), before, (False, True), strict=True):
        new = accelerator.get_state_dict(model)
        assert all(torch.equal(new[name], value) for name, value in old.items()) is stays


@on_ranks(RANKS)
def test_the_variable_names_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / f"zero{dist.get_rank()}.yaml"
    path.write_text("stage: 2\ncollectives: pairwise\n")
    os.environ["HF_ZERO_CONFIG"] = str(path)
    accelerator = zero.ZeroAccelerator(mixed_precision="bf16")
    model = accelerator.prepare(make_model(CASE))
    config = zero.engine_of(model).world.config
    assert (config.stage, config.compute_dtype, is_plain(model)) == (2, "bfloat16", False)
    with mock.patch.object(files, "show_once") as said:
        assert zero.ZeroPlugin(1).config == zero.ZeroPlugin("zero1").config == zero.ZeroConfig(stage=1)
        assert "ZeroPlugin of the script counts (stage 1), not the launcher's" in said.call_args.args[0]
        assert said.call_count == 2
        zero.ZeroPlugin({"stage": 2, "collectives": "pairwise"})  # the same
        assert said.call_count == 2
    assert zero.shard_model(make_model(CASE), 1).world.config == zero.ZeroConfig(stage=1)


# ---- what is refused ------------------------------------------------------------------------------------------------


@on_ranks(RANKS)
def test_refusals_are_errors_on_all_ranks() -> None:
    accelerator = make_accelerator(Loop())
    model, optimizer, _ = make_parts(Loop())
    _, strange, _ = make_parts(Loop())
    refused(lambda: accelerator.prepare(model, strange), "PartitionError", "belongs to no prepared model")
    accelerator.prepare(model, optimizer)
    CASE.loss(model, CASE.batch(0, dist.get_rank())).backward()
    refused(lambda: zero.ZeroPlugin(stage=4), "ConfigError", "stage")
    given = {
        "zero_plugin": zero.ZeroPlugin(stage=1),
        "kwargs_handlers": [DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)],
    }
    text = "comm_hook='bf16' of DistributedDataParallelKwargs belongs to DDP"
    refused(lambda: zero.ZeroAccelerator(**given), "ConfigError", text)
    both = {"zero_plugin": zero.ZeroPlugin(stage=1), "fsdp_plugin": object()}
    refused(lambda: zero.ZeroAccelerator(**both), "ConfigError", "cannot be combined with fsdp_plugin: leave it out")


@on_ranks(RANKS)
def test_buffers_are_broadcast_unless_ddps_options_say_not_to() -> None:
    no_buffers = DistributedDataParallelKwargs(broadcast_buffers=False)
    for handlers, is_on in (([], True), ([DistributedDataParallelKwargs()], True), ([no_buffers], False)):
        accelerator = zero.ZeroAccelerator(zero_plugin=zero.ZeroPlugin(stage=1), kwargs_handlers=handlers)
        model = accelerator.prepare(make_model(CASE))
        assert zero.engine_of(model).world.config.broadcast_buffers is is_on


@on_ranks(RANKS)
def test_infinite_norm_is_that_of_all_rows_on_every_rank() -> None:
    accelerator = make_accelerator(Loop())
    model, optimizer, _ = make_parts(Loop())
    model, optimizer = accelerator.prepare(model, optimizer)
    CASE.loss(model, CASE.batch(0, dist.get_rank())).backward()

    def largest() -> float:
        return max(whole(p.grad).abs().max().item() for p in model.parameters() if p.grad is not None)

    before = largest()
    assert accelerator.clip_grad_norm_(model.parameters(), before / 2, float("inf")).item() == before
    assert 2 * largest() == pytest.approx(before, rel=1e-4)


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


@alone()
def test_one_process_trains_as_under_a_plain_accelerator() -> None:
    ours = train_alone_with_accelerate(True)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert ours == train_alone_with_accelerate(False)


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


@on_ranks(RANKS, stage=[0, 1, 3])
def test_local_sgd_is_that_of_plain_where_nothing_is_partitioned_and_an_error_elsewhere(stage: int) -> None:
    accelerator = make_accelerator(Loop(stage=stage))
    model = make_model(CASE)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    refused = pytest.raises(zero.UsageError, match="use stage 0, or gradient accumulation")
    with refused if stage else nullcontext(), LocalSGD(accelerator, model, local_sgd_steps=2) as local:
        for step in range(4):
            accelerator.backward(CASE.loss(model, CASE.batch(step, accelerator.process_index)))
            optimizer.step()
            optimizer.zero_grad()
            local.step()
    if stage == 0:
        wanted = average_locally()
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.detach(), wanted[name], msg=name)


@on_ranks(2, stage=STAGES)
def test_clipping_takes_a_list_from_before_prepare(stage: int) -> None:
    """As scripts have it that make the optimizer of a list, and clip the list."""
    accelerator = zero.ZeroAccelerator(zero_plugin=zero.ZeroPlugin(stage=stage, collectives="pairwise"))
    model = make_model(CASE)
    listed = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(listed, lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    batch = CASE.batch(0, dist.get_rank())
    accelerator.backward(CASE.loss(model, batch))
    norm = accelerator.clip_grad_norm_(listed, 0.5)
    torch.testing.assert_close(
        accelerator.clip_grad_norm_(model.parameters(), 1e9), torch.tensor(0.5), atol=1e-4, rtol=0
    )
    assert norm > 0.5
    accelerator.clip_grad_value_(listed, 1e-3)
    assert max(whole(param.grad).abs().max() for param in model.parameters() if param.grad is not None) <= 1e-3
