"""GatheredParameters: whole tensors on demand, and what becomes of changes. And `apply` on a partitioned model.

Each rank runs the unsharded model beside the partitioned one and compares its own rows.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import hf_zero
from hf_zero.comm.ledger import Ledger
from hf_zero.engine.gathered_parameters import gather_whole
from hf_zero.sharding.init import Init
from tests.engine.twins import SHARDED, SHORT_S
from tests.models import CASES, AwkwardMLP, make_model, train
from tests.ranks import RankFailure, alone, on_ranks, run_ranks
from tests.sharding.test_construct import local_of, own_rows, same_bits

Pair = tuple[nn.Module, nn.Module]
"""The unsharded model, and the partitioned one with the same values."""


def make_pair(name: str, stage: int, is_late: bool = False, **config: Any) -> Pair:
    """With an engine, or (`is_late`) under `Init`, where it comes with the first forward."""
    reference = make_model(CASES[name])
    config = {"stage": stage, "timeout_s": 10, **config}
    if is_late:
        with Init(config):
            model = make_model(CASES[name])
    else:
        model = make_model(CASES[name])
        hf_zero.shard_model(model, config)
    return reference, model


def ledger_of(model: nn.Module) -> Ledger:
    return next(param._zero_world for param in model.parameters() if isinstance(param, DTensor)).ledger


def assert_same_rows(pair: Pair) -> None:
    """This rank's rows are those of the unsharded model."""
    reference, model = pair
    for (name, wanted), p in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert same_bits(local_of(p), own_rows(wanted, p).to(p.dtype)), name


def assert_same_forward(pair: Pair, name: str = "llama") -> None:
    """A forward sees the same weights, and so gives the same bits: other ranks' whole copies included."""
    batch = CASES[name].batch(0, dist.get_rank() if dist.is_initialized() else 0)
    with torch.no_grad():
        assert torch.equal(CASES[name].loss(pair[0], batch), CASES[name].loss(pair[1], batch))


def assert_same(pair: Pair, name: str = "llama") -> None:
    assert_same_rows(pair)
    assert_same_forward(pair, name)


@contextlib.contextmanager
def edited(pair: Pair, choose: Callable[[nn.Module], Any], **options: Any) -> Iterator[None]:
    with hf_zero.GatheredParameters(choose(pair[1]), **options), torch.no_grad():
        yield


# --- what is seen inside --------------------------------------------------------------------------------------------


def look_inside(case: tuple[int, bool]) -> None:
    """Parameters before, inside and after."""
    reference, model = pair = make_pair("llama", *case)
    held, wanted = model.lm_head.weight, reference.lm_head.weight
    untouched = model.model.norm.weight
    held.custom = "kept"
    rows = held.to_local().clone()
    assert isinstance(held, DTensor)
    with hf_zero.GatheredParameters([held, held, model.model.embed_tokens.weight]):
        inside = model.lm_head.weight
        assert (
            isinstance(inside, nn.Parameter)
            and not isinstance(inside, DTensor)
            and inside.requires_grad
            and inside.custom == "kept"
        )
        assert same_bits(inside, wanted)
        assert held.to_local().shape == wanted.shape and same_bits(held.to_local(), wanted)
        assert held.to_local().data_ptr() == inside.data_ptr()
        assert same_bits(model.model.embed_tokens.weight, reference.model.embed_tokens.weight)
        assert model.model.norm.weight is untouched
        assert not any(isinstance(value, DTensor) for value in (inside[0], inside.sum()))
    assert model.lm_head.weight is held and held.placements[0].is_shard() and same_bits(held.to_local(), rows)
    assert_same(pair)
    assert model.lm_head.weight is held


@on_ranks(2, case=[(1, False), (3, True)])
def test_parameters_are_whole_inside_and_shards_again_outside(case: tuple[int, bool]) -> None:
    look_inside(case)


@on_ranks(3)
def test_parameters_are_whole_inside_and_shards_again_outside_on_three_ranks() -> None:
    look_inside((3, False))


# --- changes that are written back ----------------------------------------------------------------------------------


def by_index(model: nn.Module) -> None:
    model.lm_head.weight[5:9] = 2.0
    model.lm_head.weight[-1, 3] += 1.0


def in_place(model: nn.Module) -> None:
    for param in model.model.layers[0].parameters():
        param.mul_(0.5).add_(0.25)


def by_init(model: nn.Module) -> None:
    torch.manual_seed(5)
    nn.init.orthogonal_(model.lm_head.weight)
    model.lm_head.weight.data.normal_()


def by_copy(model: nn.Module) -> None:
    model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    model.model.embed_tokens.weight.data = model.model.embed_tokens.weight.data.flip(0).clone()


EDITS: dict[str, tuple[Callable[[nn.Module], None], Callable[[nn.Module], Any]]] = {
    "by index": (by_index, lambda model: model.lm_head.weight),
    "in place": (in_place, lambda model: model.model.layers[0]),
    "by init": (by_init, lambda model: [model.lm_head.weight]),
    "by copy": (by_copy, lambda model: model.parameters()),
}


def change(stage: int, is_late: bool, edits: str, modifier_rank: int | None, **config: Any) -> Pair:
    """Both models, changed by every rank, or by one rank for all; by rank 0 after a forward."""
    edit, choose = EDITS[edits]
    pair = make_pair("llama", stage, is_late, **config)
    with torch.no_grad():
        if modifier_rank == 0:
            CASES["llama"].loss(pair[1], CASES["llama"].batch(0, 0))
        edit(pair[0])
    with edited(pair, choose, modifier_rank=modifier_rank):
        if modifier_rank in (None, dist.get_rank()):
            edit(pair[1])
        else:
            spoil(choose(pair[1]))  # must not count
    return pair


def spoil(chosen: Any) -> None:
    params = (
        chosen.parameters() if isinstance(chosen, nn.Module) else [chosen] if isinstance(chosen, Tensor) else chosen
    )
    for param in params:
        param.fill_(float("nan"))


@on_ranks(
    2,
    case=[(0, False), (0, True), (1, False), (2, True), (3, False), (3, True)],
    edits=list(EDITS),
    modifier_rank=[None, 0, 1],
)
def test_changes_are_written_back(case: tuple[int, bool], edits: str, modifier_rank: int | None) -> None:
    """In stages 1 and 2 the forward afterwards shows that the other ranks' whole copies are new too."""
    assert_same(change(*case, edits, modifier_rank))


@on_ranks(3, edits=list(EDITS), modifier_rank=[None, 0, 2])
def test_changes_are_written_back_on_three_ranks(edits: str, modifier_rank: int | None) -> None:
    assert_same(change(3, False, edits, modifier_rank))


@on_ranks(2, stage=[1, 3], edits=list(EDITS), modifier_rank=[None, 0, 1])
def test_changes_of_fp32_masters_are_written_back(stage: int, edits: str, modifier_rank: int | None) -> None:
    assert_same_rows(change(stage, False, edits, modifier_rank, compute_dtype="bfloat16"))


@on_ranks(2)
def test_masters_are_changed_in_full_precision() -> None:
    """A change that bf16 could not hold."""
    _, model = make_pair("llama", 2, compute_dtype="bfloat16")
    with hf_zero.GatheredParameters(model.lm_head.weight), torch.no_grad():
        assert model.lm_head.weight.dtype == torch.float32
        model.lm_head.weight.fill_(1 + 2**-20)
    seen = []
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(module.weight))
    CASES["llama"].loss(model, CASES["llama"].batch(0, 0))
    assert (model.lm_head.weight.to_local() == 1 + 2**-20).all()
    assert seen[0].dtype == torch.bfloat16 and (seen[0] == 1).all()


@on_ranks(2)
def test_what_is_replaced_or_resized_stays_plain_until_it_is_partitioned() -> None:
    pair = make_pair("llama", 3)
    model, held = pair[1], pair[1].model.norm.weight
    with edited(pair, lambda model: model):
        for each in pair:
            each.lm_head.weight = nn.Parameter(torch.full((37, 16), 0.5))
            each.model.embed_tokens.weight.data = each.model.embed_tokens.weight.data[:38].repeat(2, 1)
            each.model.norm.weight.fill_(2.0)
    plain = [name for name, param in model.named_parameters() if not isinstance(param, DTensor)]
    assert plain == ["model.embed_tokens.weight", "lm_head.weight"]
    assert model.model.norm.weight is held
    hf_zero.shard_model(model)
    assert_same(pair)


@on_ranks(2)
def test_tied_parameters_stay_tied() -> None:
    """A tied parameter, named by one of its two names."""
    reference, model = pair = make_pair("gpt2", 3)
    with edited(pair, lambda model: model.lm_head, modifier_rank=1):
        assert model.lm_head.weight is model.transformer.wte.weight
        if dist.get_rank() == 1:
            model.transformer.wte.weight[:4] = 3.0
    with torch.no_grad():
        reference.lm_head.weight[:4] = 3.0
    assert model.lm_head.weight is model.transformer.wte.weight
    assert_same_rows(pair)


class Counts(nn.Module):
    """A recurrent network, which keeps a list of its parameters, and rows for some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4)
        self.few = nn.Parameter(torch.ones(1, 3))
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x * self.few * self.scalar)[0]


@on_ranks(2, 3, modifier_rank=[None, 1])
def test_awkward_parameters_are_written_back(modifier_rank: int | None) -> None:
    """Fewer rows than ranks, none, 0-dimensional, recurrent; changed by all and by one."""
    reference = Counts()
    model = copy.deepcopy(reference)
    hf_zero.shard_model(model, {"stage": 3, "timeout_s": 10})
    for module in (reference, model):
        with hf_zero.GatheredParameters(module, modifier_rank), torch.no_grad():
            if module is reference or modifier_rank in (None, dist.get_rank()):
                for param in module.parameters():
                    param.mul_(1.5)
    assert torch.equal(model(torch.ones(2, 1, 3)), reference(torch.ones(2, 1, 3)))
    assert_same_rows((reference, model))


@on_ranks(2, stage=SHARDED)
def test_training_goes_on_from_a_change(stage: int) -> None:
    """An edit between two steps of training, which the optimizer goes on from."""
    case, pair = CASES["llama"], make_pair("llama", stage)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, foreach=False) for model in pair]
    for steps in (range(2), range(2, 3)):
        for model, optimizer, ranks in zip(pair, optimizers, (range(2), None), strict=True):
            train(model, optimizer, case.loss, case.batch, steps, ranks)
        if steps.start == 0:
            with torch.no_grad():
                by_index(pair[0])
            with edited(pair, lambda model: model.lm_head.weight):
                by_index(pair[1])
    assert_same_rows(pair)


@on_ranks(2, case=[(1, False), (3, False), (3, True)])
def test_forward_inside_sees_changes(case: tuple[int, bool]) -> None:
    """A forward of the whole model between two changes, inside."""
    pair = make_pair("llama", *case)
    with edited(pair, lambda model: model), torch.no_grad():
        by_index(pair[0])
        by_index(pair[1])
        assert_same_forward(pair)
        assert not isinstance(pair[1].lm_head.weight, DTensor)
        in_place(pair[0])
        in_place(pair[1])
    assert_same(pair)


@on_ranks(2, is_gathered=[False, True])
def test_a_parameter_in_use_is_refused(is_gathered: bool) -> None:
    """By a forward, or by another context."""
    _, model = make_pair("llama", 3, timeout_s=5)
    held = model.lm_head.weight
    model.lm_head.register_forward_pre_hook(lambda *_: hf_zero.GatheredParameters(held).__enter__())
    with pytest.raises(hf_zero.UsageError, match=r"lm_head\.weight.*in use"):
        if is_gathered:
            with hf_zero.GatheredParameters(held), hf_zero.GatheredParameters(held):
                pass
        else:
            CASES["llama"].loss(model, CASES["llama"].batch(0, 0))


# --- changes that are not -------------------------------------------------------------------------------------------


@on_ranks(2, stage=[1, 3], modifier_rank=[None, 1])
def test_nothing_is_sent_when_nothing_was_changed(stage: int, modifier_rank: int | None) -> None:
    pair = make_pair("llama", stage)
    assert_same_forward(pair)
    model, ledger = pair[1], ledger_of(pair[1])
    engine = hf_zero.engine_of(model)
    before = [param._version for param in model.parameters()], [unit.epoch for unit in engine.units]
    ledger.reset()
    with hf_zero.GatheredParameters(model, modifier_rank):
        model.lm_head.weight.sum()
        assert set(ledger.kinds()) <= {"agree", "gather"}
        assert {unit for kind, unit in ledger.entries if kind == "gather"} == {"whole parameters"}
        ledger.reset()
    assert ledger.kinds() == ("agree",)
    assert before == ([param._version for param in model.parameters()], [unit.epoch for unit in engine.units])
    assert_same(pair)


@on_ranks(2, case=[(None, [0, 0]), (1, [4 * 37 * 16, 0])])
def test_only_what_changed_is_sent(case: tuple[int | None, list[int]]) -> None:
    """Bytes broadcast and units refreshed when one of three parameters was changed."""
    modifier_rank, num_bytes = case
    _, model = make_pair("llama", 1)
    engine, ledger = hf_zero.engine_of(model), ledger_of(model)
    layer = model.model.layers[0]
    chosen = [layer.input_layernorm.weight, layer.mlp.up_proj.weight, model.lm_head.weight]
    before = [unit.epoch for unit in engine.units]
    with hf_zero.GatheredParameters(chosen, modifier_rank), torch.no_grad():
        ledger.reset()
        if modifier_rank in (None, dist.get_rank()):
            model.lm_head.weight[-1] = 7.0
    (changed,) = [unit.name for unit, epoch in zip(engine.units, before, strict=True) if unit.epoch != epoch]
    assert {unit for kind, unit in ledger.entries if kind == "gather"} == {changed}
    assert ledger.total("broadcast").bytes == num_bytes[dist.get_rank()]


@on_ranks(2, stage=[1, 3])
def test_nothing_is_written_back_after_an_exception(stage: int) -> None:
    pair = make_pair("llama", stage)
    model, held = pair[1], pair[1].lm_head.weight
    with pytest.raises(ValueError, match="no"), edited(pair, lambda model: model.lm_head):
        model.lm_head.weight.fill_(3.0)
        raise ValueError("no")
    assert model.lm_head.weight is held and held.placements[0].is_shard()
    assert_same_rows(pair)
    with edited(pair, lambda model: model.lm_head):
        model.lm_head.weight.fill_(4.0)
    with torch.no_grad():
        pair[0].lm_head.weight.fill_(4.0)
    assert_same(pair)


# --- misuse ---------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_is_not_ours_and_ranks_that_do_not_exist_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("mine",))
    with pytest.raises(hf_zero.UsageError, match="not made by hf_zero"):
        hf_zero.GatheredParameters(nn.Parameter(distribute_tensor(torch.ones(4), mesh))).__enter__()
    _, model = make_pair("llama", 3, timeout_s=2)
    with pytest.raises(hf_zero.UsageError, match=r"modifier_rank=2.*0 to 1"):
        hf_zero.GatheredParameters(model.lm_head.weight, modifier_rank=2).__enter__()


def enter_alone() -> None:
    _, model = make_pair("llama", 3, timeout_s=SHORT_S)
    if dist.get_rank() == 0:
        with hf_zero.GatheredParameters(model.lm_head.weight):
            pass
    else:
        time.sleep(SHORT_S + 1)  # a rank that goes on with its own work


def test_a_rank_that_enters_alone_is_told_who_is_missing() -> None:
    failure, other = run_ranks(enter_alone, 2, expect_failure=True)
    assert isinstance(failure, RankFailure) and failure.type_name == "CollectiveError", failure
    assert "rank 1" in failure.message and "whole parameters" in failure.message
    assert other is None


@on_ranks(2)
def test_plain_parameters_and_enabled_false_are_left_alone() -> None:
    """What is plain, or not to be gathered, stays what it is; a parameter of a closed engine too."""
    linear = nn.Linear(3, 5)
    with hf_zero.GatheredParameters(linear), torch.no_grad():
        linear.weight.fill_(2.0)
    assert (linear.weight == 2).all()
    _, model = make_pair("llama", 3)
    held = model.lm_head.weight
    with hf_zero.GatheredParameters(model, enabled=False):
        assert model.lm_head.weight is held
    with hf_zero.GatheredParameters([]):
        pass
    hf_zero.engine_of(model).close()
    with hf_zero.GatheredParameters(held), torch.no_grad():
        model.lm_head.weight.fill_(2.0)
    assert (held.to_local() == 2).all()


@alone()
def test_everything_is_plain_in_a_world_of_one() -> None:
    pair = make_pair("llama", 3)
    with edited(pair, lambda model: model.lm_head):
        pair[1].lm_head.weight.fill_(2.0)
    with torch.no_grad():
        pair[0].lm_head.weight.fill_(2.0)
    assert_same(pair)


@on_ranks(2)
def test_contexts_nest() -> None:
    """One context in another, for other parameters."""
    reference, model = pair = make_pair("llama", 3)
    with edited(pair, lambda model: model.lm_head):
        model.lm_head.weight.fill_(2.0)
        with edited(pair, lambda model: model.model.norm):
            model.model.norm.weight.fill_(3.0)
        assert type(model.lm_head.weight.data) is Tensor
    with torch.no_grad():
        reference.lm_head.weight.fill_(2.0)
        reference.model.norm.weight.fill_(3.0)
    assert_same_rows(pair)
    assert same_bits(gather_whole(model.lm_head.weight), reference.lm_head.weight)


# --- apply ----------------------------------------------------------------------------------------------------------


def look_only(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        assert param.shape and param.dtype


def scale_and_fill(module: nn.Module) -> None:
    with torch.no_grad():
        for param in module.parameters(recurse=False):
            param.mul_(0.5)
        if isinstance(module, nn.Linear):
            module.weight.clamp_(-0.01, 0.01)
            module.weight.data.add_(0.125)
        if isinstance(module, nn.Embedding):
            module.weight.fill_(0.25)


def apply_both(stage: int, is_late: bool, name: str) -> None:
    """`apply` of a function that looks, and of one that does deterministic maths in place."""
    reference, model = pair = make_pair(name, stage, is_late)
    if not is_late:
        assert_same_forward(pair, name)
    ledger = ledger_of(model)
    ledger.reset()
    addresses = [local_of(param).data_ptr() for param in model.parameters()]
    versions = [param._version for param in model.parameters()]
    model.apply(look_only)
    assert ledger.kinds() == () and versions == [param._version for param in model.parameters()]
    model.apply(scale_and_fill)
    reference.apply(scale_and_fill)
    assert ledger.kinds() == () and addresses == [local_of(param).data_ptr() for param in model.parameters()]
    assert_same(pair, name)


@on_ranks(2, case=[(3, False), (1, False), (2, True)], name=["llama", "gpt2"])
def test_apply_of_deterministic_maths_needs_no_exchange(case: tuple[int, bool], name: str) -> None:
    apply_both(*case, name)


@on_ranks(3, name=["llama", "gpt2"])
def test_apply_of_deterministic_maths_needs_no_exchange_on_three_ranks(name: str) -> None:
    apply_both(3, True, name)


@on_ranks(3)
def test_apply_knows_uneven_rows() -> None:
    reference = AwkwardMLP()
    model = copy.deepcopy(reference)
    hf_zero.shard_model(model, {"stage": 3})
    for module in (reference, model):
        module.apply(scale_and_fill)
    assert_same_rows((reference, model))


@on_ranks(2, stage=[1, 3])
def test_a_model_of_which_a_part_is_gathered_computes(stage: int) -> None:
    """Forwards and `generate` while a part of the model is whole, after forwards that are foretold."""
    pair = make_pair("llama", stage)
    assert_same_forward(pair)
    with hf_zero.GatheredParameters([pair[1].lm_head.weight, *pair[1].model.layers[0].parameters()]):
        assert_same_forward(pair)
        ids = torch.arange(6)[None]
        written = [model.generate(ids, max_new_tokens=4, do_sample=False) for model in pair]
    assert torch.equal(*written)
    assert_same_forward(pair)
