"""What several calls use: its gradients are added up before they are reduced, as autograd adds them up before DDP's hooks."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import hf_zero as zero
from tests.models import CASES, make_model
from tests.ranks import on_ranks

_TIED = "transformer.wte + lm_head"


def _numbers_of_reductions(engine: Any) -> dict[str, int]:
    lines = engine.world.ledger.entries.items()
    return {unit: line.calls for (kind, unit), line in lines if kind == "reduce_scatter"}


def _whole(grad: Any) -> Tensor:
    whole: Tensor = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return whole


@on_ranks(2, stage=[1, 2, 3], collectives=["pairwise", "native"], compute_dtype=["auto", "bfloat16"])
def test_tied_weight_is_reduced_once_where_sums_travel_as_they_are(
    stage: int, collectives: str, compute_dtype: str
) -> None:
    """In bfloat16, `pairwise` sends in stages 2 and 3 what autograd made, and adds it up in float32 where it arrives."""
    case = CASES["gpt2"]
    model = make_model(case)
    plain = DistributedDataParallel(make_model(case))
    engine = zero.shard_model(
        model, {"stage": stage, "collectives": collectives, "compute_dtype": compute_dtype, "reduce_dtype": "float32"}
    )
    for step in range(2):
        engine.world.ledger.reset()
        for each in (model, plain):
            each(**case.batch(step, dist.get_rank())).loss.backward()
        sends_parts = stage > 1 and (collectives, compute_dtype) == ("pairwise", "bfloat16")
        assert _numbers_of_reductions(engine)[_TIED] == (2 if sends_parts else 1)
        assert set(_numbers_of_reductions(engine).values()) <= {1, 2 if sends_parts else 1}
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert compute_dtype != "auto" or torch.equal(_whole(ours.grad), _whole(theirs.grad)), name
            ours.grad = theirs.grad = None


class _OfSum(nn.Module):
    """Autograd gives both parameters one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.one + self.other)


class _Repeated(nn.Module):
    """Calls one layer three times, and another once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.last = _OfSum(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        out: Tensor = self.last(x)
        return out


_UNITS = {"units": ["_OfSum", "Linear"], "keep_whole_numel": 0}


def _input(rank: int) -> Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(rank)).requires_grad_()


@on_ranks(2, stage=[1, 2, 3], is_late=[False, True])
def test_what_waits_is_reduced_when_the_running_backward_comes_to_it_no_more(stage: int, is_late: bool) -> None:
    """Other graphs use the layers too: their backward comes later, or never; and one graph has two backwards."""
    model, plain = _Repeated(), _Repeated()
    engine = zero.shard_model(model, {"stage": stage, "collectives": "pairwise", **_UNITS})

    def losses(each: nn.Module, rank: int) -> list[Tensor]:
        return [each(_input(rank) * factor).square().sum() for factor in (1.0, 2.0, 3.0)]

    for rank in range(2):
        of_plain = losses(plain, rank)
        sum(2 * of_plain[index] / 2 for index in ((0,) if is_late else (0, 2))).backward()  # type: ignore[union-attr]
    ours = losses(model, dist.get_rank())
    engine.world.ledger.reset()
    ours[0].backward(retain_graph=True)
    assert _numbers_of_reductions(engine) == {"layer": 1, "last": 1}
    ours[0].backward()
    assert _numbers_of_reductions(engine) == {"layer": 2, "last": 2}, _numbers_of_reductions(engine)
    if not is_late:
        ours[2].backward(retain_graph=True)
        ours[2].backward()
        assert _numbers_of_reductions(engine) == {"layer": 4, "last": 4}
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(_whole(param.grad), expected.grad)


@on_ranks(2, stage=[1, 2, 3])
def test_graphs_that_nobody_runs_keep_no_gradient_waiting(stage: int) -> None:
    """Reductions begin while the backward goes on, though another forward of the same layers has its backward later."""
    model = _Repeated()
    engine = zero.shard_model(model, {"stage": stage, "collectives": "pairwise", **_UNITS})
    x, begun = _input(dist.get_rank()), []
    kept = model(x)
    for _ in range(3):
        engine.world.ledger.reset()
        out = model(x)
        x.register_hook(lambda grad: begun.append(_numbers_of_reductions(engine)))
        out.sum().backward()
    assert begun[-1] == {"last": 1}  # when the backward came to the input, before the last gradients of the layer
    kept.sum().backward()


class _OfParts(nn.Module):
    """Adapters, whose own calls nobody makes."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = nn.functional.linear(x, part.weight, part.bias)
        return x


@on_ranks(2, stage=[1, 2, 3], is_called=[True, False])
def test_parameters_that_are_used_one_by_one_are_reduced_together(stage: int, is_called: bool) -> None:
    """Read in the forward of the model, or by a function beside it, as where another model's modules call them."""
    torch.manual_seed(0)
    model = _OfParts()
    plain = copy.deepcopy(model)
    engine = zero.shard_model(model, {"stage": stage, "collectives": "native"})
    inputs = [torch.randn(3, 6) for _ in range(2)]
    (sum(plain(x).square().sum() for x in inputs) / 2).backward()  # type: ignore[union-attr]
    engine.world.ledger.reset()
    x = inputs[dist.get_rank()]
    (model(x) if is_called else _OfParts.forward(model, x)).square().sum().backward()
    assert set(_numbers_of_reductions(engine).values()) == {1}
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(_whole(ours.grad), theirs.grad)
