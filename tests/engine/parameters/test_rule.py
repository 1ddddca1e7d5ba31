"""The rule for tensors at rest: any operator of torch gives on them what it gives on whole tensors."""

import pytest
import torch
from torch import nn

import hf_zero as zero
from hf_zero.engine.parameters.partitioned_tensor import PartitionedTensor
from hf_zero.engine.ranks.world import World, world_that_cut
from tests.engine.parameters.operator_cases import Survey, survey
from tests.ranks import on_ranks, run_ranks

_PARTS = 16


@pytest.mark.slow  # a minute or two each; torch's samples: `pip install expecttest`
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("part", range(_PARTS))
def test_operators_of_torch_give_what_they_give_on_whole_tensors(part: int, num_ranks: int) -> None:
    found, *others = run_ranks(_survey, num_ranks, part, timeout_s=1500)
    print(part, num_ranks, found)  # pytest -rP
    assert not found.failures, "\n".join(sorted(found.failures))
    assert all(other == found for other in others)


def _survey(part: int) -> Survey:
    return survey(part, _PARTS, _world())


@on_ranks(2, 3)
def test_lists_that_are_not_put_together_by_element_are_whole() -> None:
    world = _world()
    plain = [[torch.randn(4, 5), torch.randn(2, 3)], [torch.randn(5, 3), torch.randn(3, 3)]]
    rest = [[_at_rest(each, world) for each in one] for one in plain]
    if hasattr(torch, "_foreach_mm"):  # since torch 2.12
        for found, expected in zip(torch._foreach_mm(*rest), torch._foreach_mm(*plain), strict=True):
            torch.testing.assert_close(found, expected)
    torch._foreach_maximum_(rest[0], 0.0)
    torch.testing.assert_close(rest[0][0].full_tensor(), plain[0][0].clamp(min=0))


@on_ranks(2)
def test_parts_that_torch_does_not_call_views_are_views() -> None:
    plain = torch.randn(5, 4)
    rest = _at_rest(plain, _world())
    for tensor in (rest, plain):
        tensor.unsafe_chunk(2)[1].mul_(2)
        torch.ops.aten._unsafe_view(tensor, (4, 5))[0].mul_(3)
    torch.testing.assert_close(rest.full_tensor(), plain)


@on_ranks(2)
def test_a_view_that_an_operator_would_resize_is_refused() -> None:
    rest = _at_rest(torch.randn(1, 1), _world())
    for shown in (rest[0], rest):
        with pytest.raises(zero.UsageError, match="changes what memory"):
            shown.addbmm_(torch.randn(2, 5, 3), torch.randn(2, 3, 4))


def _at_rest(whole: torch.Tensor, world: World) -> torch.Tensor:
    cut = world.cut_of(whole)
    return PartitionedTensor.over(cut.of(whole).clone(), cut, world)


def _world() -> World:
    model = nn.Linear(4, 4)
    zero.shard_model(model, {"stage": 2, "timeout_s": 30})
    return world_that_cut(model.weight)  # type: ignore[arg-type]
