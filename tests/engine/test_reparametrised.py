"""Models whose parameters are pruned, normalised, parametrised or assigned after they were partitioned; averages and masks of
before: beside the same lines on the unsharded model."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hf_zero as zero
from tests.engine.twins import SHARDED, Net, Twins, batch, sgd, whole
from tests.ranks import by_hand, on_ranks

WHERE = [(1, "host"), (3, "pairwise")]
Change = Callable[[nn.Module], Any]


def _l1(model: nn.Module) -> None:
    prune.l1_unstructured(model.enter, "weight", amount=0.4)
    prune.l1_unstructured(model.blocks[1].up, "bias", amount=3)


def _random(model: nn.Module) -> None:
    prune.random_unstructured(model.enter, "weight", amount=0.4)


def _structured(model: nn.Module) -> None:
    prune.ln_structured(model.enter, "weight", amount=0.4, n=2, dim=0)


def _from_masks(model: nn.Module) -> None:
    prune.custom_from_mask(model.enter, "weight", torch.arange(15).view(5, 3) % 4 > 0)
    prune.custom_from_mask(model.head, "weight", model.head.weight > 0)


def _everywhere(model: nn.Module) -> None:
    prune.global_unstructured([(model.enter, "weight"), (model.head, "weight")], prune.L1Unstructured, amount=0.3)


def _pruned_for_good(model: nn.Module) -> None:
    _l1(model)
    prune.remove(model.enter, "weight")


def _weight_norm(model: nn.Module) -> None:
    nn.utils.weight_norm(model.enter)
    parametrizations.weight_norm(model.head)


def _weight_norm_removed(model: nn.Module) -> None:
    _weight_norm(model)
    nn.utils.remove_weight_norm(model.enter)
    parametrize.remove_parametrizations(model.head, "weight")


def _spectral_norm(model: nn.Module) -> None:
    nn.utils.spectral_norm(model.enter)
    parametrizations.spectral_norm(model.head)
    model.eval()  # in training it goes on estimating, once a forward, and the unsharded model runs more of them


class _Doubled(nn.Module):
    """Without a way back."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def _parametrised(model: nn.Module) -> None:
    parametrize.register_parametrization(model.enter, "weight", _Doubled())


class _Flipped(nn.Module):
    """With a way back; what it gives is whole and plain."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flip(0)

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.flip(0)


def _parametrised_with_a_way_back(model: nn.Module) -> None:
    parametrize.register_parametrization(model.enter, "weight", _Flipped())


def _parametrised_for_a_while(model: nn.Module) -> None:
    parametrize.register_parametrization(model.enter, "weight", _Flipped())
    parametrize.remove_parametrizations(model.enter, "weight")


def _all_replaced(model: nn.Module) -> None:
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter((0.9 * param).detach()))


def _assigned(model: nn.Module) -> None:
    model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()}, assign=True)


def _assigned_in_part(model: nn.Module) -> None:
    model.enter.load_state_dict(nn.Linear(3, 5).state_dict(), assign=True)


CHANGES: list[Change] = [
    _l1,
    *by_hand(_random, _structured),
    _from_masks,
    _everywhere,
    _pruned_for_good,
    *by_hand(_weight_norm),
    _weight_norm_removed,
    _spectral_norm,
    _parametrised,
    *by_hand(_parametrised_with_a_way_back),
    _parametrised_for_a_while,
    _all_replaced,
    _assigned,
    _assigned_in_part,
]


@on_ranks(2, timeout_s=120, where=WHERE, change=CHANGES)
def test_a_model_changed_after_it_was_partitioned_is_the_unsharded_one(where: tuple[int, str], change: Change) -> None:
    stage, collectives = where
    twins = Twins(stage, collectives=collectives, units={"min_numel": 1})
    twins.step()
    for place, model in enumerate((twins.model, twins.reference)):
        torch.manual_seed(11)
        change(model)
        twins.optimizers[place] = sgd(model)
    twins.step(2)
    ours, theirs = dict(twins.model.named_buffers()), dict(twins.reference.named_buffers())
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        twins.near(whole(value), theirs[name], name)
    twins.assert_same_output()


@on_ranks(2, where=WHERE, change=[_l1, _pruned_for_good, _parametrised, _parametrised_with_a_way_back])
def test_the_optimizer_goes_on_with_pruned_and_parametrised_weights(where: tuple[int, str], change: Change) -> None:
    stage, collectives = where
    twins = Twins(stage, collectives=collectives, units={"min_numel": 1})
    twins.step()
    for model in (twins.model, twins.reference):
        change(model)
    twins.step(2)


@on_ranks(2, stage=[0, *SHARDED])
def test_load_state_dict_with_assign_keeps_what_optimizers_hold(stage: int) -> None:
    twins = Twins(stage)
    held = [id(param) for param in twins.model.parameters()]
    state = {name: 0.5 * value for name, value in twins.reference.state_dict().items()}
    twins.model.load_state_dict(state, assign=True)
    twins.reference.load_state_dict(state)
    assert held == [id(param) for param in twins.model.parameters()]
    twins.step(2)
    if stage:
        with pytest.raises(zero.UsageError, match=r"'enter\.weight' from torch\.float32 to torch\.float64"):
            twins.model.load_state_dict({name: value.double() for name, value in state.items()}, assign=True)


@on_ranks(2, stage=SHARDED)
def test_an_alias_of_a_parameter_is_no_parameter(stage: int) -> None:
    twins = Twins(stage)
    for model in (twins.model, twins.reference):
        assert not isinstance(model.enter.weight.data, nn.Parameter)
        assert not isinstance(model.enter.weight.detach(), nn.Parameter)
        model.kept = model.enter.weight.detach()
    assert [name for name, _ in twins.model.named_parameters()] == [n for n, _ in twins.reference.named_parameters()]
    twins.step()


# ---- averages and masks that were made before -----------------------------------------------------------------------


class _Shadows:
    """The average of diffusers' scripts, with `foreach`."""

    def __init__(self, model: nn.Module) -> None:
        self.values = [p.clone().detach() for p in model.parameters()]

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        torch._foreach_sub_(self.values, torch._foreach_sub(self.values, list(model.parameters())), alpha=0.1)


class _Copy:
    """The average of timm: a copy of the model, updated through state dicts."""

    def __init__(self, model: nn.Module) -> None:
        self.module = copy.deepcopy(model)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for ours, theirs in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            ours.copy_(0.9 * ours + 0.1 * theirs)

    @property
    def values(self) -> list[Tensor]:
        return [self.module(batch(7, 7)), *self.module.parameters()]


class _Averaged(_Copy):
    """Torch's own."""

    def __init__(self, model: nn.Module) -> None:
        self.module = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def update(self, model: nn.Module) -> None:
        self.module.update_parameters(model)


class _Masks:
    """Weights that stay zero."""

    def __init__(self, model: nn.Module) -> None:
        self.masks = [p.detach().abs() > 0.2 for p in model.parameters()]
        self.values = [mask.float() for mask in self.masks]

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for param, mask in zip(model.parameters(), self.masks, strict=True):
            param.data.mul_(mask)
            param[~mask] = 0


@on_ranks(2, where=WHERE, make=[_Shadows, _Copy, _Averaged, _Masks], is_before=[True, False])
def test_averages_and_masks_from_before_are_used_after(
    where: tuple[int, str], make: Callable[[nn.Module], Any], is_before: bool
) -> None:
    stage, collectives = where
    kept = []

    def with_kept() -> Net:
        model = Net()
        kept.extend([make(model)] if is_before else [])
        return model

    twins = Twins(stage, with_kept, collectives=collectives, units={"min_numel": 1})
    kept = [kept[0] if is_before else make(twins.model), make(twins.reference)]
    for _ in range(2):
        twins.step()
        for each, model in zip(kept, (twins.model, twins.reference), strict=True):
            each.update(model)
    for ours, theirs in zip(kept[0].values, kept[1].values, strict=True):
        twins.near(whole(ours), theirs.detach(), "what was kept")
    twins.step()
