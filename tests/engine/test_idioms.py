"""Idioms of public training code on parameters and gradients at rest, beside the same lines on the unsharded model."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, vector_to_parameters

import hf_zero
from tests.engine.twins import Net, Twins, batch, square_loss, whole
from tests.ranks import by_hand, on_ranks

Idiom = Callable[[nn.Module], Any]


def _trained(model: nn.Module) -> Iterator[nn.Parameter]:
    return (p for p in model.parameters() if p.grad is not None)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


# ---- between the backward and the step: gradients -------------------------------------------------------------------


def _noise(model: nn.Module) -> None:
    torch.manual_seed(3)
    for p in _trained(model):
        p.grad.add_(torch.randn_like(p.grad), alpha=0.01)


def _noise_of_a_generator(model: nn.Module) -> None:
    generator = _generator()
    for p in _trained(model):
        p.grad += 0.01 * torch.normal(0.0, 1.0, p.grad.shape, generator=generator)


def _assigned_data(model: nn.Module) -> None:
    for p in _trained(model):
        p.grad.data = p.grad.data * 0.5 + 0.01


def _mask(model: nn.Module) -> None:
    for p in _trained(model):
        p.grad[p.grad.abs() < 0.01] = 0


def _mask_of_rows(model: nn.Module) -> None:
    model.enter.weight.grad[torch.tensor([True, False, True, True, False])] = 0
    model.head.weight.grad[1].zero_()


def _multiplied(model: nn.Module) -> None:
    for p in _trained(model):
        p.grad.mul_((p.detach() > 0).float())


def _copied_from_a_vector(model: nn.Module) -> None:
    grads = [p.grad for p in _trained(model)]
    flat = torch.cat([g.reshape(-1) for g in grads])
    kept = torch.zeros_like(flat)
    chosen = flat.abs().topk(flat.numel() // 3).indices
    kept[chosen] = flat[chosen]
    start = 0
    for grad in grads:
        grad.copy_(kept[start : start + grad.numel()].view_as(grad))
        start += grad.numel()


def _set_to_plain(model: nn.Module) -> None:
    for p in _trained(model):
        p.grad = torch.full(p.shape, 0.02)


def _set_to_its_own(model: nn.Module) -> None:
    for p in _trained(model):
        p.grad = p.grad.clone().clamp(-0.05, 0.05)


def _clipped(model: nn.Module) -> list[Tensor]:
    total = clip_grad_norm_(model.parameters(), 0.1)
    clip_grad_value_(model.parameters(), 0.02)
    return [total, torch.stack([p.grad.norm() for p in _trained(model)])]


def _centralised(model: nn.Module) -> None:
    for p in _trained(model):
        if p.grad.dim() > 1:
            p.grad.add_(-p.grad.mean(dim=tuple(range(1, p.grad.dim())), keepdim=True))


def _surgery(model: nn.Module) -> list[Tensor]:
    a, b = model.enter.weight, model.head.weight
    cosine = nn.functional.cosine_similarity(a.grad.flatten(), b.grad.T.flatten(), dim=0)
    a.grad = a.grad - cosine * b.grad.T
    b.grad = b.grad.T.contiguous().T
    return [cosine, torch.tensor([torch.isfinite(p.grad).all().item() for p in _trained(model)])]


# ---- after the step: weights ----------------------------------------------------------------------------------------


class _Average:
    """The commonest average class: shadows by name, swapped in by `.data =`."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {n: p.data.clone() for n, p in model.named_parameters()}
        self.backup: dict[str, Tensor] = {}

    def update(self, model: nn.Module) -> None:
        for n, p in model.named_parameters():
            self.shadow[n] = (0.1 * p.data + 0.9 * self.shadow[n]).clone()

    def apply(self, model: nn.Module) -> None:
        for n, p in model.named_parameters():
            self.backup[n] = p.data
            p.data = self.shadow[n]

    def restore(self, model: nn.Module) -> None:
        for n, p in model.named_parameters():
            p.data = self.backup[n]


def _average(model: nn.Module) -> list[Tensor]:
    average = _Average(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    average.update(model)
    average.apply(model)
    with torch.no_grad():
        inside = model(batch(9, 9))
    average.restore(model)
    return [inside, *average.shadow.values()]


def _vector(model: nn.Module) -> list[Tensor]:
    vector = parameters_to_vector(model.parameters()).detach()
    vector_to_parameters(vector * 0.9, model.parameters())
    return [vector]


def _zeroth_order(model: nn.Module) -> list[Tensor]:
    losses = []
    for scale in (1, -2, 1):
        torch.manual_seed(5)
        for p in model.parameters():
            p.data.add_(torch.normal(mean=0, std=1, size=p.data.size(), dtype=p.data.dtype), alpha=scale * 1e-2)
        with torch.no_grad():
            losses.append(square_loss(model, batch(9, 9)))
    return losses


def _rows(model: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        model.enter.weight[0].fill_(0)
        model.enter.weight[[1, 3], :2] *= 2
        model.head.weight[:, 1] = torch.tensor([1.0, 2.0, 3.0])
        nn.init.orthogonal_(model.blocks[0].up.weight, generator=_generator())
    return [model.enter.weight[1:3], *model.head.weight.detach().unbind()]


def _pruned_by_size(model: nn.Module) -> None:
    for p in model.parameters():
        threshold = p.data.abs().flatten().kthvalue(max(1, p.numel() // 3)).values
        p.data.mul_(p.data.abs() > threshold)


def _interpolated(model: nn.Module) -> None:
    old = {n: t.clone() for n, t in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.05)
    model.load_state_dict({n: 0.3 * t + 0.7 * old[n] for n, t in model.state_dict().items()})


def _numbers(model: nn.Module) -> list[Tensor]:
    weight = model.enter.weight
    values: list[Any] = [float(weight.max()), weight.sum().item(), (weight > 0).sum().item(), weight.std().item()]
    values += [p.data.norm(2).item() for p in model.parameters()]
    values += [
        weight.detach().cpu().numpy().mean(),
        model.enter.bias.tolist()[0],
        torch.linalg.svdvals(weight)[0].item(),
    ]
    return [torch.tensor([float(value) for value in values])]


def _normalised(model: nn.Module) -> None:
    with torch.no_grad():
        for block in model.blocks:
            block.up.weight.div_(block.up.weight.norm(dim=1, keepdim=True))
        torch.renorm(model.head.weight, 2, 0, 0.5, out=model.head.weight.data)


def _unused(model: nn.Module) -> None:
    """The idiom for parameters that a batch does not use: 0 times their sum."""
    model.zero_grad()
    loss = model.enter(batch(8, 8)).pow(2).mean() + 0.0 * sum(p.sum() for p in model.parameters())
    (loss + 0.01 * sum(p.mean() + p.norm() for p in model.parameters() if p.dim() > 1)).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad, alpha=0.1)
    model.zero_grad()


_ON_GRADIENTS: list[Idiom] = [
    _noise,
    _noise_of_a_generator,
    _assigned_data,
    _mask,
    _mask_of_rows,
    _multiplied,
    _copied_from_a_vector,
    _set_to_plain,
    _set_to_its_own,
    _clipped,
    _centralised,
    _surgery,
]
_ON_WEIGHTS: list[Idiom] = [
    _average,
    _vector,
    _zeroth_order,
    _rows,
    _pruned_by_size,
    _interpolated,
    _numbers,
    _normalised,
    _unused,
]


def _check(idiom: Idiom, stage: int, collectives: str) -> None:
    twins = Twins(stage, Net, collectives=collectives, units={"min_numel": 1})
    for _ in range(2):
        twins.backward()
        twins.backward_reference()
        if idiom in _ON_WEIGHTS:
            twins.update()
        found, expected = idiom(twins.model) or [], idiom(twins.reference) or []
        for ours, theirs in zip(found, expected, strict=True):
            twins.near(whole(ours), theirs.detach(), "what it gives")
        if idiom in _ON_GRADIENTS:
            twins.update()
        twins.assert_same_output()
    twins.step()


_WHERE = [(1, "host"), (3, "pairwise"), *by_hand((2, "pairwise"), (3, "host"))]


@on_ranks(2, *by_hand(3), idiom=_ON_GRADIENTS, where=_WHERE)
def test_idioms_on_gradients_mean_what_they_mean_on_the_plain_model(idiom: Idiom, where: tuple[int, str]) -> None:
    _check(idiom, *where)


@on_ranks(2, *by_hand(3), idiom=_ON_WEIGHTS, where=_WHERE)
def test_idioms_on_weights_mean_what_they_mean_on_the_plain_model(idiom: Idiom, where: tuple[int, str]) -> None:
    _check(idiom, *where)


@pytest.mark.slow
@on_ranks(3, idiom=_ON_WEIGHTS)
def test_idioms_on_weights_mean_the_same_where_parameters_are_released(idiom: Idiom) -> None:
    _check(idiom, 3, "pairwise")


@on_ranks(2, stage=[1, 2, 3])
def test_clipping_exchanges_once_whatever_the_number_of_parameters(stage: int) -> None:
    twins = Twins(stage, Net, units={"min_numel": 1})
    twins.backward()
    ledger = hf_zero.engine_of(twins.model).world.ledger
    ledger.reset()
    clip_grad_norm_(twins.model.parameters(), 0.1)
    assert ledger.total("gather").calls == 1
    assert {unit for kind, unit in ledger.entries if kind == "gather"} == {"norms of partitioned tensors"}
