"""What users and torch do with a parameter outside of its module's call, beside the same on the unsharded model."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero as zero
from tests.engine.twins import EXCHANGES, SHARDED, Net, Twins, assert_same
from tests.ranks import on_ranks

_INDEX, _SCALES = torch.tensor([1, 2, 2, 5]), torch.tensor([0.1, 0.2, 0.3])
# Whose gradients torch's formulas fill into tensors like the parameter, or give without memory.
_TERMS: dict[str, Callable[[Tensor], Tensor]] = {
    "take": lambda w: torch.take(w, _INDEX).pow(2).sum(),
    "angle": lambda w: (torch.angle(w) * w).sum(),
    "power of 0": lambda w: torch.pow(w, 0).sum() + w.sum(),
    "orgqr": lambda w: torch.orgqr(w.T, _SCALES).pow(2).sum(),
    "put": lambda w: torch.put(w, _INDEX, torch.ones(4)).pow(2).sum(),
    "gather": lambda w: w.gather(0, torch.zeros(1, 3, dtype=torch.long)).pow(2).sum(),
    "cumprod": lambda w: torch.cumprod(w, 0).pow(2).sum(),
    "median": lambda w: w.median(),
}


@on_ranks(2, stage=SHARDED, collectives=EXCHANGES, term=list(_TERMS))
def test_gradients_of_operators_on_a_parameter(stage: int, collectives: str, term: str) -> None:
    """Each rank's term has another factor, so that none may take another's gradient for its own."""
    twins = Twins(stage, collectives=collectives)
    (_TERMS[term](twins.model.head.weight) * (1.0 + twins.rank)).backward()
    for rank in range(twins.num_ranks):
        (_TERMS[term](twins.reference.head.weight) * (1.0 + rank) / twins.num_ranks).backward()
    torch.testing.assert_close(twins.model.head.weight.grad.full_tensor(), twins.reference.head.weight.grad)


class _Signs(Net):
    """Computes with signs, whose gradient torch gives without memory."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return self.head(x) @ torch.sgn(self.head.weight @ self.head.weight.T) + torch.sgn(self.head.bias)


@on_ranks(2, stage=SHARDED, collectives=EXCHANGES)
def test_gradients_without_memory(stage: int, collectives: str) -> None:
    twins = Twins(stage, _Signs, collectives=collectives)
    twins.step()
    twins.step()
    weight = twins.model.enter.weight
    (torch.sgn(weight).sum() * 2).backward()
    assert not weight.grad.full_tensor().any()


@on_ranks(2, stage=SHARDED)
def test_a_hook_makes_its_states_of_rows(stage: int) -> None:
    """Beside torch's formulas, which ask for the whole in the same way."""
    twins = Twins(stage)
    states: list[Tensor] = []
    param = twins.model.head.weight
    param.register_post_accumulate_grad_hook(lambda param: states.append(torch.zeros_like(param)))
    twins.model.blocks[0].register_full_backward_hook(lambda *_: states.append(torch.zeros_like(param)))
    twins.backward()
    assert [type(state) for state in states] == [type(param.detach())] * 2


class _Scaled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.6592))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.exp()  # type: ignore[no-any-return]


@on_ranks(2, stage=SHARDED)
def test_numbers_are_formatted(stage: int) -> None:
    twins = Twins(stage, _Scaled)
    twins.backward()
    for loss in twins.backward_reference():
        del loss
    sources: list[Callable[[nn.Module], Tensor]] = [
        lambda model: model.scale.detach(),
        lambda model: model.scale.data,
        lambda model: model.scale.grad,
        lambda model: model.state_dict()["scale"],
        lambda model: model.head.weight[0, 0],
        lambda model: model.head.weight.detach()[0, 0],
        lambda model: model.head.bias.grad[1],
    ]
    for source in sources:
        ours, theirs = source(twins.model), source(twins.reference)
        assert (f"{ours:.4f}", f"{ours:9.2e}", "%.3f" % ours) == (f"{theirs:.4f}", f"{theirs:9.2e}", "%.3f" % theirs)  # noqa: UP031
        assert f"{ours}"[:5] == f"{theirs}"[:5]
    for model in (twins.model, twins.reference):
        with pytest.raises(TypeError, match="unsupported format string"):
            format(model.scale, ".4f")  # as torch has it for a parameter itself


@on_ranks(2, stage=SHARDED, syncs=[False, True])
def test_a_copied_parameter_has_no_gradient(stage: int, syncs: bool) -> None:
    twins = Twins(stage)
    if syncs:
        twins.backward()
    else:
        with twins.engine.no_sync():
            twins.backward()
    twins.backward_reference()
    pairs = [(copy.deepcopy(model), model) for model in (twins.model, twins.reference)]
    for copied, model in pairs:
        assert all(param.grad is None for param in copied.parameters())
        assert all(param.grad is not None for param in model.parameters())
    for copied, _ in pairs:
        (copied.head.weight.sum() * 3).backward()
        torch.optim.SGD(copied.parameters(), lr=0.1).step()
    assert_same(pairs[0][0], pairs[1][0])


@on_ranks(2, stage=SHARDED)
def test_parameters_are_exchanged_by_swap_tensors(stage: int) -> None:
    twins = Twins(stage)
    twins.step()
    for model in (twins.model, twins.reference):
        torch.utils.swap_tensors(model.blocks[0].up.weight, model.blocks[1].up.weight)
    assert_same(twins.model, twins.reference)
    twins.step()
    twins.step()
    for model in (twins.model, twins.reference):
        model.blocks[0].up.weight.requires_grad_(False)
        torch.utils.swap_tensors(model.blocks[0].up.weight, model.blocks[1].up.weight)
        assert [block.up.weight.requires_grad for block in model.blocks[:2]] == [True, False]
    with pytest.raises(zero.UsageError, match=r"swap_tensors of .* which differ in shape"):
        torch.utils.swap_tensors(twins.model.enter.weight, twins.model.head.bias)
    dist.barrier()
