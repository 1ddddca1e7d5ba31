"""The rule for tensors at rest: any operator of torch gives on them what it gives on whole tensors."""

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import hf_zero as zero
from hf_zero.engine.parameters.partitioned_tensor import PartitionedTensor
from hf_zero.engine.ranks.world import World, world_that_cut
from tests.ranks import on_ranks

_SAMPLES = 4  # of each operator, those that torch gives first
_WAYS = ("parameter", "gradient", "view", "graph", "in place", "in place, a view")
# What they give depends on memory that they do not fill, or on where tensors lie.
_NOT_COMPARED = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "empty_permuted",
}


def _operators() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db  # seconds, and needs `expecttest`

    return [op for op in op_db if torch.float32 in op.dtypes and not op.name.startswith("_refs")]


def _a_few_of(op: Any) -> list[Any]:
    torch.manual_seed(5)
    try:
        samples: Iterator[Any] = op.sample_inputs("cpu", torch.float32)
        return [sample for _, sample in zip(range(_SAMPLES), samples, strict=False)]
    except Exception:
        return []  # torch's own samples need what is not there, such as SciPy


def _at_rest(whole: Tensor, world: World, way: str) -> Tensor:
    rest = PartitionedTensor.over(world.cut_of(whole).of(whole).clone(), world.cut_of(whole), world)
    if way == "gradient":
        param = rest.as_parameter(requires_grad=True)
        param.grad = rest.like(rest.rows.clone())
        return param.grad
    if way.endswith("view"):
        return rest.reshape(1, *whole.shape)[0]
    if way == "graph":
        return rest.as_parameter(requires_grad=True)
    return rest.as_parameter(requires_grad=False)


def _run(op: Any, sample: Any, put: Any, in_place: bool = False) -> tuple[Any, list[Tensor]]:
    """What the operator gives, and what its operands hold afterwards."""
    tensors: list[Tensor] = []

    def replace(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.ndim or not value.is_floating_point():
            return value.detach().clone() if isinstance(value, Tensor) else value
        tensors.append(put(value.detach().clone(memory_format=torch.contiguous_format)))
        return tensors[-1]

    subject, args, kwargs = pytree.tree_map(replace, (sample.input, sample.args, sample.kwargs))
    torch.manual_seed(9)
    return (op.inplace_variant if in_place else op.op)(subject, *args, **kwargs), tensors


def _whole(value: Any) -> Any:
    def one(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()

    return pytree.tree_map(one, value)


def _gradients(outputs: Any, inputs: list[Tensor]) -> Any:
    given = [t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
    total = [t.abs().sum() for t in given]
    return [_whole(each) for each in torch.autograd.grad(total, inputs, allow_unused=True)] if given else []


def _compare(op: Any, sample: Any, world: World, way: str) -> str:
    in_graph, in_place = way == "graph", way.startswith("in place")
    if in_place and op.inplace_variant is None:
        return "no such operator"
    try:
        expected, plain = _run(op, sample, lambda t: t.requires_grad_(in_graph), in_place)
        wanted = _gradients(expected, plain)
    except Exception:
        return "not for one process"
    found, rest = _run(op, sample, lambda t: _at_rest(t, world, way), in_place)
    for tensor in pytree.tree_leaves(found):
        assert not isinstance(tensor, DTensor) or isinstance(tensor, PartitionedTensor)
    if op.name in _NOT_COMPARED:
        return "not compared"
    torch.testing.assert_close(_whole(rest), _whole(plain), equal_nan=True)
    pairs = zip(pytree.tree_leaves(_whole(found)), pytree.tree_leaves(_whole(expected)), strict=True)
    for here, there in pairs:
        torch.testing.assert_close(here, there, equal_nan=True)
    for here, there in zip(_gradients(found, rest), wanted, strict=True):
        torch.testing.assert_close(here, there, equal_nan=True)
    return "equal, with gradients" if wanted else "equal"


@pytest.mark.slow  # torch's samples: `pip install expecttest`
@pytest.mark.parametrize("part", range(4))
@on_ranks(2, 3, timeout_s=1500)
def test_operators_of_torch_give_what_they_give_on_whole_tensors(part: int) -> None:
    world = _world()
    counts: Counter[str] = Counter()
    failures = []
    for op in _operators()[part::4]:
        for sample in _a_few_of(op):
            for way in _WAYS:
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        counts[_compare(op, sample, world, way)] += 1
                except zero.UsageError as error:
                    counts["an error of ours"] += 1
                    assert "changes what memory" in str(error)
                except Exception as error:
                    failures.append(
                        f"{op.name}/{op.variant_test_name} ({way}): {type(error).__name__}: {str(error)[:150]}"
                    )
    print(part, dict(counts), len(failures))
    assert not failures, "\n".join(sorted(set(failures)))


def _world() -> World:
    model = nn.Linear(4, 4)
    zero.shard_model(model, {"stage": 2, "timeout_s": 30})
    return world_that_cut(model.weight)  # type: ignore[arg-type]
