"""Code that looks for tied weights compares addresses: each parameter has its own, in every stage, on every rank."""

from itertools import pairwise

import torch
from torch import nn

import hf_zero as zero
from tests.engine.twins import EXCHANGES, SHARDED, STAGES, square_loss
from tests.ranks import on_ranks


class Tied(nn.Module):
    """Some of its weights have fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(1, 1)
        self.embed, self.head = nn.Embedding(5, 1), nn.Linear(1, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.two(self.one(self.enter(x)))) * self.scale


def _groups(model: nn.Module, address) -> list[list[str]]:  # type: ignore[no-untyped-def]
    found: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found.setdefault(address(param), []).append(name)
    return list(found.values())


@on_ranks(2, 3, stage=STAGES, collectives=EXCHANGES)
def test_tied_weights_are_found_by_their_addresses(stage: int, collectives: str) -> None:
    model = Tied()
    zero.shard_model(model, {"stage": stage, "collectives": collectives, "timeout_s": 20})
    expected = [[name] for name, _ in model.named_parameters()]
    expected[expected.index(["embed.weight"])].append("head.weight")
    before = [p.data_ptr() for p in model.parameters()]
    for _ in range(2):
        for address in (
            lambda p: p.data_ptr(),
            lambda p: p.data.data_ptr(),
            lambda p: p.detach().data_ptr(),
            lambda p: p.view(-1).data_ptr(),
            lambda p: p.untyped_storage().data_ptr(),
            lambda p: p.storage().data_ptr(),
        ):
            assert sorted(_groups(model, address)) == sorted(expected), (_groups(model, address), expected)
        square_loss(model, torch.randn(2, 3)).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert [p.data_ptr() for p in model.parameters()] == before


@on_ranks(2, stage=SHARDED)
def test_addresses_are_those_of_a_whole(stage: int) -> None:
    model = Tied()
    zero.shard_model(model, {"stage": stage, "timeout_s": 20})
    weight = model.enter.weight
    assert weight[1].data_ptr() - weight.data_ptr() == 3 * 4
    assert weight.untyped_storage().nbytes() == 12 * 4
    assert weight.untyped_storage() is weight.t()[1].untyped_storage()
    spans = sorted((p.data_ptr(), p.data_ptr() + p.untyped_storage().nbytes()) for p in model.parameters())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    with zero.GatheredParameters(weight):
        assert weight.data_ptr() == model.enter.weight.data_ptr()
