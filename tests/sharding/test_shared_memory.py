"""Parameters that share memory are refused; what modules hold of a parameter's memory follows it."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero as zero
from tests.ranks import on_ranks


class _Coder(nn.Module):
    """An encoder, and what decodes: made by `how` of the encoder, or of its weight."""

    def __init__(self, how: Callable[["_Coder"], None]) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8, bias=False)
        how(self)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.tanh(self.encoder(x))
        return nn.functional.linear(seen, self.taken) if "taken" in vars(self) else self.decoder(seen)


def _as_parameter(model: _Coder) -> None:
    model.decoder.weight = nn.Parameter(model.encoder.weight.t())


def _as_data(model: _Coder) -> None:
    model.decoder.weight.data = model.encoder.weight.data.t()


def _as_slice(model: _Coder) -> None:
    model.decoder = nn.Linear(8, 2)
    model.decoder.weight = nn.Parameter(model.encoder.weight.data[1:3])


def _as_buffer(model: _Coder) -> None:
    model.register_buffer("kept", model.encoder.weight.detach())


@on_ranks(2, how=[_as_parameter, _as_data, _as_slice, _as_buffer])
def test_parameters_that_share_memory_are_refused(how: Callable[[_Coder], None]) -> None:
    zero.shard_model(_Coder(how).requires_grad_(False), {"stage": 1})  # nothing would change them
    with pytest.raises(zero.UsageError, match=r"'encoder.weight' and '(decoder.weight|kept)' share memory"):
        zero.shard_model(_Coder(how), {"stage": 1})


@on_ranks(2)
def test_parts_of_one_buffer_that_do_not_overlap_are_not_shared() -> None:
    model, flat = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(40)
    columns = torch.randn(4, 8)
    model[0].bias.data, model[1].bias.data = flat[:4], flat[4:8]  # as cuDNN keeps the weights of an LSTM
    model[0].weight.data, model[1].weight.data = columns[:, :4], columns[:, 4:]
    zero.shard_model(model, {"stage": 1})


def _alias(model: _Coder) -> None:
    vars(model)["taken"] = model.encoder.weight.detach().t()


def _view_in_graph(model: _Coder) -> None:
    vars(model)["taken"] = model.encoder.weight.t()


def _itself(model: _Coder) -> None:
    model.encoder = nn.Linear(8, 8)
    vars(model)["taken"] = model.encoder.weight.data


@on_ranks(2, stage=[1, 3], how=[_as_parameter, _as_data, _as_slice, _alias, _view_in_graph])
def test_memory_that_is_shared_while_a_model_is_made_is_refused(stage: int, how: Callable[[_Coder], None]) -> None:
    is_alias = how in (_alias, _view_in_graph)
    told = r"_Coder.taken is the memory of the parameter 'weight' of Linear" if is_alias else "share memory"
    models = []
    with pytest.raises(zero.UsageError, match=told), zero.Init({"stage": stage}):
        models.append(_Coder(how))


@on_ranks(2, collectives=["pairwise", "host"], stage=[1, 3])
def test_aliases_from_before_the_engine_follow_a_parameter(collectives: str, stage: int) -> None:
    with zero.Init({"stage": stage, "collectives": collectives}):
        model = nn.Linear(4, 4)
    aliases = model.weight.detach(), model.weight.data.t()
    zero.shard_model(model)
    model(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    whole = model.weight.full_tensor()
    assert torch.equal(aliases[0].full_tensor(), whole) and torch.equal(aliases[1].full_tensor(), whole.t())


@on_ranks(2, stage=[1, 3])
def test_spectral_norm_of_torch_is_partitioned_as_it_is_made(stage: int) -> None:
    with zero.Init({"stage": stage}):
        model = nn.utils.spectral_norm(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()


@on_ranks(2, stage=[1, 3], how=[_alias, _view_in_graph, _itself])
def test_what_a_module_holds_of_a_parameter_follows_it(stage: int, how: Callable[[_Coder], None]) -> None:
    losses = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        model: nn.Module = _Coder(how)
        if is_sharded:
            zero.shard_model(model, {"stage": stage})
        else:
            model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(4):
            loss = (model(torch.full((2, 8), 0.1 * (step + dist.get_rank()))) - 1).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[4:] == pytest.approx(losses[:4], abs=1e-6) and losses[3] < losses[0]


class _OfFlat(nn.Module):
    """Its weight is a part of a larger tensor, and it holds a row of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 80)[20:52].view(4, 8))
        self.row = self.weight.data[1]

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t()).sum() + (self.row * x).sum()


@on_ranks(2, config=[{"stage": 0}, {"stage": 1}, {"stage": 3}, {"stage": 3, "keep_whole_numel": 100}])
def test_an_alias_of_a_part_of_a_larger_tensor_shows_that_part(config: dict[str, int]) -> None:
    losses = []
    for is_sharded in (False, True):
        model = _OfFlat()
        if is_sharded:
            zero.shard_model(model, config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            loss = (model(torch.ones(2, 8)) - 1).square()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-5)


class _Rounded(nn.Parameter):
    """A class whose methods somebody may need."""


@on_ranks(2, stage=[0, 3])
def test_parameters_of_a_class_of_their_own_are_refused_where_they_would_lose_it(stage: int) -> None:
    model = nn.Linear(4, 4)
    model.weight = _Rounded(torch.ones(4, 4))
    if stage:
        with pytest.raises(
            zero.PartitionError, match=r"weight is a _Rounded, and partitioned it would be a plain parameter"
        ):
            zero.shard_model(model, {"stage": stage})
    else:
        zero.shard_model(model, {"stage": stage})
        assert type(model.weight) is _Rounded
