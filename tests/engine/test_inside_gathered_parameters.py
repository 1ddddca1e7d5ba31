"""Training, loading and reading inside `GatheredParameters`, beside the same code on the unsharded model."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hf_zero as zero
from tests.engine.twins import EXCHANGES, SHARDED, STAGES, Net, Twins, assert_same, sgd, whole
from tests.ranks import on_ranks

CHOSEN: dict[str, Callable[[nn.Module], Any]] = {
    "all": lambda model: model,
    "head": lambda model: model.head,
}


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, weight_decay=0.1)


@on_ranks(2, stage=STAGES, case=[("pairwise", "head"), ("host", "all")])
def test_a_step_of_training_inside_is_one_outside(stage: int, case: tuple[str, str]) -> None:
    collectives, chosen = case
    twins = Twins(stage, collectives=collectives, optimizer=_adamw, timeout_s=20)
    twins.step()
    with zero.GatheredParameters(CHOSEN[chosen](twins.model)):
        for _ in range(2):
            twins.backward()
            twins.backward_reference()
            for (name, p), (_, expected) in zip(
                twins.model.named_parameters(), twins.reference.named_parameters(), strict=True
            ):
                twins.near(whole(p.grad), expected.grad, name)
            norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.05) for m in (twins.model, twins.reference)]
            torch.testing.assert_close(*norms)
            with torch.no_grad():
                for model in (twins.model, twins.reference):
                    model.head.weight[1] += 0.25
            twins.update()
    assert_same(twins.model, twins.reference)
    twins.step()


@on_ranks(3, collectives=EXCHANGES)
def test_a_step_of_training_inside_is_one_outside_on_three_ranks(collectives: str) -> None:
    twins = Twins(3, collectives=collectives, prefetch_bytes=0, timeout_s=20)
    with zero.GatheredParameters(twins.model):
        twins.step(2)
    twins.step()


@on_ranks(2, stage=SHARDED, is_step_inside=[False, True])
def test_gradients_of_outside_and_inside_add_up(stage: int, is_step_inside: bool) -> None:
    twins = Twins(stage, timeout_s=20)
    twins.backward()
    twins.backward_reference()
    twins.steps_done += 1
    with zero.GatheredParameters(twins.model):
        twins.backward()
        penalty = 0.1 * twins.model.head.weight.square().sum()
        penalty.backward()
        twins.backward_reference()
        (0.1 * twins.reference.head.weight.square().sum()).backward()
        if is_step_inside:
            twins.update()
    if not is_step_inside:
        twins.update()
    twins.step()


@on_ranks(2, stage=[1, 3])
def test_a_step_with_a_closure_inside_is_one_outside(stage: int) -> None:
    twins = Twins(stage, timeout_s=20)
    with zero.GatheredParameters(twins.model):
        twins.optimizers[0].step(twins.backward)
        twins.optimizers[1].step(lambda: torch.stack(twins.backward_reference()).mean())
        assert_same(twins.model, twins.reference)
    assert_same(twins.model, twins.reference)


@on_ranks(2, stage=STAGES, collectives=EXCHANGES, modifier_rank=[None, 0])
def test_state_dicts_are_loaded_inside(stage: int, collectives: str, modifier_rank: int | None) -> None:
    """By all ranks, or by the one whose changes count."""
    twins = Twins(stage, collectives=collectives, timeout_s=20)
    twins.step()
    torch.manual_seed(5)
    values = {name: value + torch.randn_like(value) for name, value in twins.reference.state_dict().items()}
    twins.reference.load_state_dict(values)
    with zero.GatheredParameters(twins.model, modifier_rank=modifier_rank):
        if modifier_rank in (None, dist.get_rank()):
            twins.model.load_state_dict(values)
    assert_same(twins.model, twins.reference)
    twins.assert_same_output()
    twins.step()


# --- one parameter after the other, as programs for DeepSpeed do ------------------------------------------------------


@on_ranks(2, stage=SHARDED, collectives=EXCHANGES)
def test_what_is_taken_inside_is_plain_and_stays_so(stage: int, collectives: str) -> None:
    torch.manual_seed(0)
    model = Net()
    wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
    zero.shard_model(model, {"stage": stage, "collectives": collectives, "timeout_s": 20})
    kept: dict[str, list[Tensor]] = {}
    for name, p in model.named_parameters():
        with zero.GatheredParameters([p], modifier_rank=None):
            kept[name] = [
                p.clone(),
                p.data,
                p.detach(),
                p.data.cpu().clone(),
                p.full_tensor(),
                p.to_local(),
                p[...],
                1.0 * p,
            ]
            kept[name] += [copy.deepcopy(p), p.view(-1).view(p.shape), torch.stack([p])[0]]
            assert float(p.norm()) == pytest.approx(float(wanted[name].norm()), rel=1e-5)
            assert p.data.flatten().tolist() == wanted[name].flatten().tolist()
            if p.ndim:
                assert p[0].tolist() == wanted[name][0].tolist()
        assert isinstance(p, DTensor)
    for name, tensors in kept.items():
        for place, tensor in enumerate(tensors):
            assert not isinstance(tensor, DTensor) and torch.equal(tensor.detach(), wanted[name]), (name, place)


@on_ranks(2, stage=STAGES, collectives=EXCHANGES)
def test_edits_of_a_reference_taken_before_are_kept(stage: int, collectives: str) -> None:
    """A moving average, and an edit by one rank for all."""
    twins = Twins(stage, collectives=collectives, timeout_s=20)
    averages = [copy.deepcopy(dict(twins.reference.named_parameters())) for _ in range(2)]
    for model, average in zip((twins.model, twins.reference), averages, strict=True):
        for name, p in model.named_parameters():
            is_modifier = model is twins.reference or dist.get_rank() == 1
            with zero.GatheredParameters([p], modifier_rank=1), torch.no_grad():
                average[name].mul_(0.9).add_(p.data, alpha=0.1)
                if is_modifier:
                    p.data.mul_(0.5)
                    p.data[0] = 0.25
                    p.add_(average[name])
                    p.data = p.data + 0.125
    for name, expected in averages[1].items():
        torch.testing.assert_close(averages[0][name], expected)
    assert_same(twins.model, twins.reference)
    twins.step(2)


@on_ranks(2, stage=SHARDED)
def test_an_optimizer_of_what_was_whole_steps_on_the_parameters(stage: int) -> None:
    twins = Twins(stage, timeout_s=20)
    with zero.GatheredParameters(twins.model):
        twins.optimizers[0] = sgd(twins.model)
    for _ in range(2):
        twins.step()
    assert {id(p) for p in twins.optimizers[0].param_groups[0]["params"]} == {id(p) for p in twins.model.parameters()}


@on_ranks(2, stage=SHARDED)
def test_gradients_are_kept_back_inside_no_sync(stage: int) -> None:
    twins = Twins(stage, timeout_s=20)
    for micro in range(2):
        with (
            zero.GatheredParameters(twins.model),
            twins.engine.no_sync() if micro == 0 else contextlib.nullcontext(),
        ):
            twins.backward()
        twins.backward_reference()
        twins.steps_done += 1
    twins.update()
