"""Modules that stay whole between uses in stage 3 (`units: {whole: [...]}`): some ranks may skip those."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero as zero
from hf_zero.config.zero_config import UnitGrouping
from hf_zero.engine.units.differing import _outermost
from hf_zero.engine.units.grouping import group
from hf_zero.plan.summary import model_states
from tests.ranks import on_ranks


class _Sees(nn.Module):
    """A model with a tower and a projector for samples that have an image."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleDict(
            {"blocks": nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))}
        )
        self.projector = nn.Linear(6, 6)
        self.embed = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(3))
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, has_image: bool) -> torch.Tensor:
        seen = x
        if has_image:
            for block in self.tower["blocks"]:
                seen = block(seen)
            seen = self.projector(seen)
        x = self.embed(x) + seen
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


def _model(trains_tower: bool) -> _Sees:
    torch.manual_seed(0)
    model = _Sees()
    model.tower.requires_grad_(trains_tower)
    return model


def _sample(step: int) -> tuple[torch.Tensor, bool]:
    rank = dist.get_rank()
    torch.manual_seed(10 * step + rank)
    return torch.randn(4, 6), (step + rank) % 3 != 0


_WHOLE = {"whole": ["tower", "proj*"]}


@on_ranks(
    2,
    3,
    collectives=["pairwise", "native", "host"],
    trains_tower=[True, False],
    more=[
        {},
        {"prefetch_bytes": 0, "reshard_after_forward": True},
        {"wire": {"gather": "bfloat16"}},
        {"units": {"min_numel": 40}},
    ],
)
def test_ranks_may_skip_what_stays_whole(collectives: str, trains_tower: bool, more: dict[str, object]) -> None:
    more = dict(more)
    if collectives == "host":
        more.pop("wire", None)
    is_exact = "wire" not in more
    units = {**_WHOLE, **more.pop("units", {})}  # type: ignore[dict-item]
    model, oracle = _model(trains_tower), _model(trains_tower)
    engine = zero.shard_model(model, {"stage": 3, "collectives": collectives, "units": units, **more})
    assert all(unit.keeps_whole == unit.name.startswith(("tower", "projector")) for unit in engine.units)
    peer = nn.parallel.DistributedDataParallel(oracle, find_unused_parameters=True)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, oracle)]
    for step in range(6):
        x, has_image = _sample(step)
        engine.world.ledger.reset()
        loss = model(x, has_image)
        expected = peer(x, has_image)
        torch.testing.assert_close(loss, expected, atol=1e-6 if is_exact else 2e-2, rtol=1e-5)
        loss.backward()
        expected.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step and collectives != "host":
            moved = sum(engine.world.ledger.total(kind).bytes for kind in ("gather", "reduce_scatter"))
            assert model_states(engine).traffic == pytest.approx(moved, abs=200)
    with zero.GatheredParameters(model.parameters()):
        for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
            torch.testing.assert_close(ours.detach(), theirs, atol=2e-5 if is_exact else 2e-2, rtol=1e-4)


class _Routed(nn.Module):
    """Each rank calls a branch of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(6, 6), nn.Linear(6, 1)
        self.branches = nn.ModuleDict({name: nn.Linear(6, 6) for name in ("a", "b", "c")})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.branches["abc"[dist.get_rank()]](self.enter(x))).square().mean()


@on_ranks(2, 3, collectives=["pairwise", "native"])
def test_an_error_names_what_only_some_ranks_have_called(collectives: str) -> None:
    model = _Routed()
    zero.shard_model(model, {"stage": 3, "collectives": collectives, "timeout_s": 20})
    # `native` has mixed the branches up by then, which are of one size.
    told = r"Only some have called branches: with `units: \{whole: \[branches\]\}`"
    told = told if collectives == "native" else r"is at gather of 'branches\..', but .*units: \{whole: \[its name\]\}"
    with pytest.raises(zero.CollectiveError, match=told):
        for _ in range(3):
            model(torch.ones(2, 6)).backward()


def test_a_part_of_a_block_that_stays_whole_is_a_unit_of_its_own() -> None:
    parts = {
        part.name: part.stays_whole for part in group(_Sees(), UnitGrouping(whole=("tower", "blocks.1.2", "Tanh")))
    }
    assert parts == {
        **{"tower.blocks.0": True, "tower.blocks.1": True, "projector": False, "embed": False, "head": False},
        **{"blocks.0": False, "blocks.1": False, "blocks.1.2": True, "blocks.2": False},
    }


def test_what_is_tied_to_the_rest_does_not_stay() -> None:
    model = _Sees()
    model.projector.weight = model.embed.weight
    parts = {part.name: part.stays_whole for part in group(model, UnitGrouping(whole=("projector",)))}
    assert parts["projector + embed"] is False and parts["projector"] is True  # the bias


def test_a_module_that_is_not_there_is_an_error() -> None:
    with pytest.raises(zero.ConfigError, match=r"'units.whole': 'towers' fits no module of _Sees"):
        zero.shard_model(copy.deepcopy(_Sees()), {"stage": 3, "units": {"whole": ["towers"]}})


def test_names_are_those_of_the_outermost_modules() -> None:
    others = ["model.layers.0", "head + model.embed"]
    assert _outermost(["model.tower.blocks.0", "model.tower.blocks.1 (experts)", "model.layers.1"], others) == [
        "model.tower",
        "model.layers.1",
    ]
