"""Many tensors are cast and padded at once: on a device, each launch costs more than a small tensor's copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hf_zero as zero
from hf_zero.comm.collectives import Collectives, Rows
from hf_zero.comm.copies import copies_of, padded_copies_of
from hf_zero.comm.groups.process_groups import cells_of
from hf_zero.comm.groups.select import make_collectives
from hf_zero.comm.ledger import Ledger
from hf_zero.layout import RowLayout
from tests.ranks import on_ranks

_SHAPES = [(7, 3), (4, 2), (5,)]
_FREE = {
    "empty",
    "new_empty",
    "view",
    "slice",
    "split",
    "detach",
    "as_strided",
    "reshape",
    "t",
    "zeros",
    "_unsafe_view",
}


class Launches(TorchDispatchMode):
    """Counts what a device would have to be told, by name; views and memory cost it nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and name not in _FREE:
            self.counted[name] += 1
        return func(*args, **(kwargs or {}))


def _make() -> Collectives:
    ranks = [rank for (rank,) in cells_of(None, 1)[0]]
    return make_collectives("native", ranks, torch.device("cpu"), 20.0, Ledger())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_have_the_values_and_zeros_behind_them(dtype: torch.dtype) -> None:
    tensors = [torch.randn(5), torch.randn(3).bfloat16(), torch.randn(0)]
    padded = padded_copies_of(tensors, [dtype] * 3, [5, 8, 2])
    for tensor, copy, numel in zip(tensors, padded, (5, 8, 2), strict=True):
        assert torch.equal(copy, nn.functional.pad(tensor.to(dtype), (0, numel - len(tensor))))
    assert all(
        torch.equal(copy, tensor.to(dtype))
        for copy, tensor in zip(copies_of(tensors, [dtype] * 3), tensors, strict=True)
    )
    assert padded_copies_of([], [], []) == copies_of([], []) == []


@on_ranks(2, method=["reduce_scatter", "reduce_whole"])
def test_a_reduction_casts_and_pads_by_as_many_launches_whatever_it_is_of(method: str) -> None:
    collectives, found = _make(), []
    reduce: Callable[..., Any] = getattr(collectives, method)
    for times in (1, 5):
        layouts = [RowLayout(shape, collectives.num_ranks) for shape in _SHAPES * times]
        items = [Rows(torch.full((layout.numel,), 1.0, dtype=torch.bfloat16), layout) for layout in layouts]
        outputs = [torch.empty(layout.local_numel(collectives.rank)) for layout in layouts]
        with Launches() as launches:
            reduce(items, outputs, "unit", 4).wait()
        del launches.counted["copy_"]  # gloo's own
        found.append(launches.counted)
        assert all((output == 0.5).all() for output in outputs)
    assert found[0] == found[1], found


class _Norms(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(6)) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(x * weight).sum() for weight in self.weights]).sum()


@on_ranks(2, stage=[0, 2, 3], config=[{}, {"keep_whole_numel": 100}, {"master_dtype": "auto"}])
def test_a_unit_of_many_parameters_is_reduced_and_added_up_by_as_many_launches(
    stage: int, config: dict[str, Any]
) -> None:
    if stage == 0 and "master_dtype" in config:
        return  # parameters are plain, and autograd adds their gradients up
    found = []
    for count in (2, 12):
        model: nn.Module = nn.Sequential(_Norms(count))
        if config.get("master_dtype"):
            model = model.bfloat16()
        chosen = {"compute_dtype": "bfloat16", "collectives": "native", "units": ["_Norms"], "timeout_s": 20, **config}
        zero.shard_model(model, {"stage": stage, **chosen})
        launches = Counter[str]()
        for _ in range(2):  # the second one adds to what is there
            loss = model(torch.ones(6, dtype=torch.bfloat16))
            with Launches() as counted:
                loss.backward()
            launches += counted.counted
        found.append({name: number for name, number in launches.items() if name in _OF_REDUCTIONS})
        assert all((param.grad.full_tensor() if stage else param.grad == 2).all() for param in model.parameters())  # type: ignore[union-attr]
    assert found[0] == found[1], found


_OF_REDUCTIONS = {
    "_to_copy",
    "add_",
    "clone",
    "constant_pad_nd",
    "div",
    "div_",
    "_foreach_copy_",
    "_foreach_add_",
}


class _Refuses:
    """A transport that has no averages, as some devices' libraries."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __call__(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, **kwargs: Any) -> Any:
        self.asked.append(op)
        if op == dist.ReduceOp.AVG:
            raise RuntimeError("Cannot use ReduceOp.AVG here")
        return _all_reduce(tensor, op=op, **kwargs)


_all_reduce = dist.all_reduce


@on_ranks(2, name=["nccl", "xccl", "a new one"], can=[True, False])
def test_averages_are_taken_from_a_transport_that_has_them_whatever_its_name(name: str, can: bool) -> None:
    collectives = _make()
    collectives.backend = name
    asked = _Refuses()
    with mock.patch.object(dist, "all_reduce", _all_reduce if can else asked):
        if can:
            with mock.patch.object(dist.ReduceOp, "AVG", dist.ReduceOp.SUM):
                assert collectives._operation(2) == (dist.ReduceOp.SUM, 1)
                return
        for _ in range(2):
            total = torch.full((3,), 1.0 + dist.get_rank())
            collectives.all_reduce([total], "unit", divisor=2).wait()
            assert (total == 1.5).all()
    assert asked.asked == [dist.ReduceOp.AVG, dist.ReduceOp.SUM, dist.ReduceOp.SUM]
