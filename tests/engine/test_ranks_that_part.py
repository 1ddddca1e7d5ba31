"""Ranks that take other paths through the same model, and penalties inside a forward, beside the unsharded model."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero as zero
from tests.engine.twins import EXCHANGES, SHARDED, SHORT_S, Net, Twins, batch
from tests.ranks import RankFailure, by_hand, on_ranks, run_ranks

MASKS = torch.tensor([[[1, 0, 0, 0], [0, 0, 1, 1]], [[0, 0, 0, 1], [0, 0, 1, 1]]]).bool()  # the first cannot be nested


@on_ranks(2, stage=SHARDED, collectives=EXCHANGES)
def test_an_encoder_nests_on_the_ranks_whose_masks_allow_it(stage: int, collectives: str) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    reference = nn.TransformerEncoder(layer, 2)
    model = copy.deepcopy(reference)
    zero.shard_model(model, {"stage": stage, "collectives": collectives, "timeout_s": 20})
    x, mask = torch.randn(2, 4, 8), MASKS[dist.get_rank()]
    for each in (model, reference):
        each.eval()
    for mode in (torch.no_grad(), torch.enable_grad()):
        with mode:
            torch.testing.assert_close(
                model(x, src_key_padding_mask=mask), reference(x, src_key_padding_mask=mask), equal_nan=True
            )


def _of_one_rank(model: nn.Module, x: Tensor) -> Tensor:
    """One rank has nothing to learn from, and touches its parameters nevertheless."""
    if x is None:
        return 0 * sum(p.sum() for p in model.parameters())
    return model(x).square().mean()


def _draw(step: int, rank: int) -> Tensor | None:
    return None if rank else batch(step, rank)


@on_ranks(2, stage=[1, 2], collectives=EXCHANGES)
def test_a_loss_of_nothing_on_one_rank_counts_as_under_ddp(stage: int, collectives: str) -> None:
    """Where each rank has whole parameters between uses."""
    Twins(stage, loss=_of_one_rank, draw=_draw, collectives=collectives, timeout_s=20).step(2)


def _train_of_one_rank(collectives: str) -> None:
    Twins(3, loss=_of_one_rank, draw=_draw, collectives=collectives, timeout_s=SHORT_S).step()


def test_a_loss_of_nothing_on_one_rank_is_an_error_in_stage_3() -> None:
    for collectives in ("host", *by_hand("pairwise")):
        failures = run_ranks(_train_of_one_rank, 2, collectives, expect_failure=True)
        assert all(isinstance(each, RankFailure) and each.type_name == "CollectiveError" for each in failures), failures


class Penalised(Net):
    """Penalises all its parameters in its own forward; one of them has a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.randn(1, 5))

    def forward(self, x: Tensor) -> Tensor:
        penalty = sum(p.square().sum() + p.abs().mean() for p in self.parameters())
        return super().forward(x).square().mean() * self.row.max() + 0.01 * penalty + self.row.amin(1).sum()


@on_ranks(2, stage=SHARDED, collectives=EXCHANGES)
def test_a_penalty_inside_the_forward_trains_and_evaluates(stage: int, collectives: str) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x) + model.row.max() + model.row.max(dim=1).values.sum()

    twins = Twins(stage, Penalised, loss, collectives=collectives, timeout_s=20)
    twins.step()
    for mode in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with mode:
            torch.testing.assert_close(*(model.eval()(batch(9, 9)) for model in (twins.model, twins.reference)))
    twins.step()


def _alone(case: str) -> None:
    twins = Twins(3, collectives="pairwise", timeout_s=SHORT_S)
    twins.step()
    if case == "forward":
        if not dist.get_rank():
            twins.model(batch(9, 0))
    else:
        twins.model(batch(9, dist.get_rank())).sum().backward()
        if not dist.get_rank():
            torch.nn.utils.get_total_norm([p.grad for p in twins.model.parameters()])
    twins.step()


@pytest.mark.parametrize("case", ["forward", "norms"])
def test_what_only_rank_0_runs_is_an_error_on_all_ranks(case: str) -> None:
    failures = run_ranks(_alone, 2, case, expect_failure=True)
    assert all(isinstance(each, RankFailure) and each.type_name == "CollectiveError" for each in failures), failures
