"""`torch.autograd.grad`: gradients of inputs that are differentiated again, as in penalties on slopes, and of parameters."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero as zero
from tests.engine.twins import EXCHANGES, STAGES, Near, Net, Twins, assert_same, batch, square_loss
from tests.ranks import on_ranks


def _slope(model: nn.Module, x: Tensor) -> Tensor:
    """How far the norm of the output's gradient is from 1, as a penalty."""
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (grad.norm(dim=1) - 1).pow(2).mean()


def _critic(model: nn.Module, x: Tensor) -> Tensor:
    """WGAN-GP: three calls in one loss."""
    fake = 0.5 * x.roll(1, 0)
    return model(fake).mean() - model(x).mean() + 0.1 * _slope(model, 0.5 * (x + fake))


def _slope_alone(model: nn.Module, x: Tensor) -> Tensor:
    return _slope(model, x)


def _forces(model: nn.Module, x: Tensor) -> Tensor:
    """An energy and its forces, both fitted."""
    x = x.detach().requires_grad_()
    energy = model(x).pow(2).sum(dim=1)
    (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True, retain_graph=True)
    return (energy - 1).pow(2).mean() + (forces - x).pow(2).mean()


def _third(model: nn.Module, x: Tensor) -> Tensor:
    """A gradient of a gradient of a gradient."""
    x = x.detach().requires_grad_()
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)
    return 0.01 * second.pow(2).mean() + model(x).pow(2).mean()


LOSSES: list[Callable[[nn.Module, Tensor], Tensor]] = [_critic, _slope_alone, _forces, _third]


@on_ranks(2, 3, stage=STAGES, collectives=EXCHANGES)
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_of_inputs_are_differentiated(stage: int, collectives: str, loss: Any) -> None:
    twins = Twins(stage, loss=loss, collectives=collectives)
    twins.step(3)


@on_ranks(2, stage=STAGES)
def test_a_penalty_goes_back_later_than_other_losses(stage: int) -> None:
    twins = Twins(stage, collectives="pairwise")
    for _ in range(2):
        for model in (twins.model, twins.reference):
            ranks = range(2) if model is twins.reference else [twins.rank]
            for rank in ranks:
                x = batch(twins.steps_done, rank)
                penalty = _slope(model, x)
                for other in (x, 2 * x):
                    (square_loss(model, other) / len(ranks)).backward()
                with torch.no_grad():
                    model(x)
                (penalty / len(ranks)).backward()
        twins.update()


@on_ranks(2, stage=STAGES)
def test_a_generator_and_its_critic_are_trained_in_turn(stage: int) -> None:
    torch.manual_seed(0)
    models = [Net(), Net()]
    references = copy.deepcopy(models)
    for model in models:
        zero.shard_model(model, zero.ZeroConfig(stage=stage, collectives="pairwise"))
    rank = dist.get_rank()
    optimizers = [[torch.optim.AdamW(each.parameters(), lr=0.01) for each in pair] for pair in (models, references)]
    for step in range(3):
        for (generator, critic), (for_generator, for_critic), ranks in (
            (models, optimizers[0], [rank]),
            (references, optimizers[1], [0, 1]),
        ):
            for each in ranks:
                x, fake = batch(step, each), generator(batch(step + 50, each)).detach()
                loss = critic(fake).mean() - critic(x).mean() + 10 * _slope(critic, 0.5 * (x + fake))
                (loss / len(ranks)).backward()
            for_critic.step()
            for_critic.zero_grad()
            critic.requires_grad_(False)
            for each in ranks:
                (-critic(generator(batch(step + 50, each))).mean() / len(ranks)).backward()
            for_generator.step()
            for_generator.zero_grad()
            critic.requires_grad_(True)
        for model, reference in zip(models, references, strict=True):
            assert_same(model, reference)


@on_ranks(2)
def test_units_stay_whole_until_parameters_change_and_no_longer() -> None:
    twins = Twins(3, loss=_critic, collectives="pairwise", prefetch_bytes=0, reshard_after_forward=True)
    for _ in range(3):
        twins.step()
        assert not any(unit.is_whole for unit in twins.engine.units)
        _slope(twins.model, twins.own())
        assert all(unit.is_whole for unit in twins.engine.units)


# ---- gradients of parameters -----------------------------------------------------------------------------------------


def _asked(model: nn.Module) -> list[nn.Parameter]:
    return [model.head.weight, model.blocks[0].up.bias, model.enter.weight]


def _read_and_called(model: nn.Module, x: Tensor) -> Tensor:
    """Uses the head's weight in its call, twice, and outside of it."""
    return square_loss(model, x) + square_loss(model, 2 * x) + (model.head.weight**2).sum()


@on_ranks(2, 3, stage=STAGES, collectives=EXCHANGES)
def test_gradients_of_parameters_are_this_ranks_own(stage: int, collectives: str) -> None:
    twins = Twins(stage, collectives=collectives)
    for loss in (square_loss, _read_and_called):
        found, expected = (
            torch.autograd.grad(loss(model, twins.own()), _asked(model)) for model in (twins.model, twins.reference)
        )
        torch.testing.assert_close(found, expected)
        assert all(param.grad is None for param in twins.model.parameters())
        twins.step()


def _balanced(model: nn.Module, x: Tensor) -> Tensor:
    """As in VQGAN: two losses, the second weighed by the norms of their gradients in the last layer."""
    first, second = square_loss(model, x), model(x).abs().mean()
    norms = [torch.autograd.grad(each, model.head.weight, retain_graph=True)[0].norm() for each in (first, second)]
    return first + (norms[0] / (norms[1] + 1e-4)).detach() * second


@on_ranks(2, stage=STAGES, collectives=EXCHANGES)
def test_losses_are_weighed_by_their_gradients_in_a_layer(stage: int, collectives: str) -> None:
    Twins(stage, loss=_balanced, collectives=collectives).step(3)


# ---- inside a forward ------------------------------------------------------------------------------------------------


class _LossesInside(nn.Module):
    """As the autoencoders that are trained with a critic: its forward differentiates what it has computed so far."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.net, self.critic, self.way = Net(), Net(), way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "penalty":
            return self.net(x).pow(2).mean() + _critic(self.critic, x)
        y = self.net(x)
        first, second = (y - x).pow(2).mean(), self.critic(y).mean()
        last = self.net.head.weight
        norms = [torch.autograd.grad(each, last, retain_graph=True)[0].norm() for each in (first, second)]
        return first + (norms[0] / (norms[1] + 1e-4)).detach() * second


@on_ranks(2, stage=STAGES, collectives=EXCHANGES)
@pytest.mark.parametrize("way", ["penalty", "balance"])
def test_a_forward_may_differentiate_what_it_has_computed(stage: int, collectives: str, way: str) -> None:
    twins = Twins(stage, make=lambda: _LossesInside(way), loss=lambda model, x: model(x), collectives=collectives)
    twins.step(3)


@on_ranks(2, stage=STAGES)
def test_a_gradient_of_what_a_hook_has_caught_is_differentiated_later(stage: int) -> None:
    """No output of the block has a gradient in the first pass, and its weights are whole from its forward."""
    twins = Twins(stage, collectives="pairwise", near=Near(1e-4, 1e-5), reshard_after_forward=stage != 3)
    caught: list[Tensor] = []
    for _ in range(2):
        for model in (twins.model, twins.reference):
            ranks = range(2) if model is twins.reference else [twins.rank]
            handle = model.blocks[1].up.register_forward_hook(lambda module, args, output: caught.append(output))
            for rank in ranks:
                x = batch(twins.steps_done, rank).requires_grad_()
                model(x)
                (grad,) = torch.autograd.grad(caught.pop().tanh().sum(), x, create_graph=True)
                assert all(
                    unit.is_whole for unit in twins.engine.units if unit.name in ("enter", "blocks.0", "blocks.1")
                )
                (square_loss(model, x.detach()) / len(ranks)).backward()
                caught.clear()
                (grad.pow(2).sum() / len(ranks)).backward()
            handle.remove()
        twins.update()
