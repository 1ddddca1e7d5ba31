"""GatheredParameters: whole tensors on demand, and what becomes of changes. And `apply` on a partitioned model.

Each rank runs the unsharded model beside the partitioned one and compares its own rows.
"""

from __future__ import annotations

import contextlib
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
from tests.models import CASES, AwkwardMLP, make_model
from tests.ranks import RankFailure, run_alone, run_ranks
from tests.sharding.test_construct import Problems, collect, local_of, own_rows, same_bits

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


def wrong_rows(pair: Pair) -> list[str]:
    """Names of the parameters of which this rank's rows are not those of the unsharded model."""
    reference, model = pair
    pairs = zip(reference.named_parameters(), model.parameters(), strict=True)
    return [n for (n, wanted), p in pairs if not same_bits(local_of(p), own_rows(wanted, p).to(p.dtype))]


def is_forward_equal(pair: Pair, name: str) -> bool:
    """Whether a forward sees the same weights, and so gives the same bits: other ranks' whole copies included."""
    batch = CASES[name].batch(0, dist.get_rank() if dist.is_initialized() else 0)
    with torch.no_grad():
        return torch.equal(CASES[name].loss(pair[0], batch), CASES[name].loss(pair[1], batch))


@contextlib.contextmanager
def edited(pair: Pair, choose: Callable[[nn.Module], Any], **options: Any) -> Iterator[None]:
    with hf_zero.GatheredParameters(choose(pair[1]), **options), torch.no_grad():
        yield


# --- what is seen inside --------------------------------------------------------------------------------------------


def facts_inside(stage: int, is_late: bool) -> list[bool]:
    """Runs on a rank: parameters before, inside and after."""
    reference, model = pair = make_pair("llama", stage, is_late)
    held, wanted = model.lm_head.weight, reference.lm_head.weight
    untouched = model.model.norm.weight
    held.custom = "kept"
    rows = held.to_local().clone()
    facts = [isinstance(held, DTensor)]
    with hf_zero.GatheredParameters([held, held, model.model.embed_tokens.weight]):
        inside = model.lm_head.weight
        facts += [
            type(inside) is nn.Parameter and inside.requires_grad and inside.custom == "kept",
            same_bits(inside, wanted),
            held.to_local().shape == wanted.shape and same_bits(held.to_local(), wanted),
            held.placements[0].is_replicate() and held.to_local().data_ptr() == inside.data_ptr(),
            same_bits(model.model.embed_tokens.weight, reference.model.embed_tokens.weight),
            model.model.norm.weight is untouched,
            not any(isinstance(value, DTensor) for value in (inside[0], inside.sum())),
        ]
    facts += [model.lm_head.weight is held, held.placements[0].is_shard(), same_bits(held.to_local(), rows)]
    facts += [wrong_rows(pair) == [], is_forward_equal(pair, "llama"), model.lm_head.weight is held]
    return facts


@pytest.mark.parametrize(("num_ranks", "stage", "is_late"), [(2, 1, False), (2, 3, True), (3, 3, False)])
def test_parameters_are_whole_inside_and_shards_again_outside(num_ranks: int, stage: int, is_late: bool) -> None:
    assert run_ranks(facts_inside, num_ranks, stage, is_late) == [[True] * 14] * num_ranks


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


def problems_of_edits(stage: int, is_late: bool, config: dict[str, Any]) -> Problems:
    """Runs on a rank: changes by every rank, and by one rank for all, before training and after a step."""
    problems: Problems = {}
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for name, (edit, choose) in EDITS.items():
        for modifier_rank in (None, 0, last):

            def check(edit: Any = edit, choose: Any = choose, modifier_rank: int | None = modifier_rank) -> list[str]:
                pair = make_pair("llama", stage, is_late, **config)
                if modifier_rank == 0:
                    is_forward_equal(pair, "llama")
                with torch.no_grad():
                    edit(pair[0])
                with edited(pair, choose, modifier_rank=modifier_rank):
                    if modifier_rank in (None, rank):
                        edit(pair[1])
                    else:
                        spoil(choose(pair[1]))  # must not count
                return wrong_rows(pair) + ([] if config or is_forward_equal(pair, "llama") else ["another forward"])

            collect(problems, f"{name}, modifier_rank={modifier_rank}", check)
    return problems


def spoil(chosen: Any) -> None:
    params = (
        chosen.parameters() if isinstance(chosen, nn.Module) else [chosen] if isinstance(chosen, Tensor) else chosen
    )
    for param in params:
        param.fill_(float("nan"))


@pytest.mark.parametrize(
    ("num_ranks", "stage", "is_late"),
    [(2, 0, False), (2, 0, True), (2, 1, False), (2, 2, True), (2, 3, False), (2, 3, True), (3, 3, False)],
)
def test_changes_are_written_back(num_ranks: int, stage: int, is_late: bool) -> None:
    """In stages 1 and 2 the forward afterwards shows that the other ranks' whole copies are new too."""
    assert run_ranks(problems_of_edits, num_ranks, stage, is_late, {}) == [{}] * num_ranks


def test_changes_of_fp32_masters_are_written_back() -> None:
    for stage in (1, 3):
        assert run_ranks(problems_of_edits, 2, stage, False, {"compute_dtype": "bfloat16"}) == [{}] * 2


def facts_of_masters() -> list[Any]:
    """Runs on a rank: a change that bf16 could not hold."""
    _, model = make_pair("llama", 2, compute_dtype="bfloat16")
    with hf_zero.GatheredParameters(model.lm_head.weight), torch.no_grad():
        dtype = model.lm_head.weight.dtype
        model.lm_head.weight.fill_(1 + 2**-20)
    seen = []
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(module.weight))
    CASES["llama"].loss(model, CASES["llama"].batch(0, 0))
    rows = model.lm_head.weight.to_local()
    return [dtype, bool((rows == 1 + 2**-20).all()), seen[0].dtype, bool((seen[0] == 1).all())]


def test_masters_are_changed_in_full_precision() -> None:
    assert run_ranks(facts_of_masters, 2) == [[torch.float32, True, torch.bfloat16, True]] * 2


def facts_of_replaced() -> list[Any]:
    """Runs on a rank: parameters that are replaced or resized inside, and partitioned afterwards."""
    pair = make_pair("llama", 3)
    model, held = pair[1], pair[1].model.norm.weight
    with edited(pair, lambda model: model):
        for each in pair:
            each.lm_head.weight = nn.Parameter(torch.full((37, 16), 0.5))
            each.model.embed_tokens.weight.data = each.model.embed_tokens.weight.data[:38].repeat(2, 1)
            each.model.norm.weight.fill_(2.0)
    plain = [name for name, param in model.named_parameters() if not isinstance(param, DTensor)]
    is_held = model.model.norm.weight is held
    hf_zero.shard_model(model)
    return [plain, is_held, wrong_rows(pair), is_forward_equal(pair, "llama")]


def test_what_is_replaced_or_resized_stays_plain_until_it_is_partitioned() -> None:
    plain = ["model.embed_tokens.weight", "lm_head.weight"]
    assert run_ranks(facts_of_replaced, 2) == [[plain, True, [], True]] * 2


def facts_of_tied() -> list[Any]:
    """Runs on a rank: a tied parameter, named by one of its two names."""
    reference, model = pair = make_pair("gpt2", 3)
    with edited(pair, lambda model: model.lm_head, modifier_rank=1):
        is_tied = model.lm_head.weight is model.transformer.wte.weight
        if dist.get_rank() == 1:
            model.transformer.wte.weight[:4] = 3.0
    with torch.no_grad():
        reference.lm_head.weight[:4] = 3.0
    return [is_tied, model.lm_head.weight is model.transformer.wte.weight, wrong_rows(pair)]


def test_tied_parameters_stay_tied() -> None:
    assert run_ranks(facts_of_tied, 2) == [[True, True, []]] * 2


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


def problems_of_awkward_parameters() -> Problems:
    """Runs on a rank: fewer rows than ranks, none, 0-dimensional, recurrent; changed by all and by one."""
    problems: Problems = {}
    for modifier_rank in (None, 1):

        def check(modifier_rank: int | None = modifier_rank) -> list[str]:
            torch.manual_seed(0)
            reference = Counts()
            torch.manual_seed(0)
            model = Counts()
            hf_zero.shard_model(model, {"stage": 3, "timeout_s": 10})
            for module in (reference, model):
                with hf_zero.GatheredParameters(module, modifier_rank), torch.no_grad():
                    if module is reference or modifier_rank in (None, dist.get_rank()):
                        for param in module.parameters():
                            param.mul_(1.5)
            same = torch.equal(model(torch.ones(2, 1, 3)), reference(torch.ones(2, 1, 3)))
            return wrong_rows((reference, model)) + ([] if same else ["another forward"])

        collect(problems, f"modifier_rank={modifier_rank}", check)
    return problems


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_awkward_parameters_are_written_back(num_ranks: int) -> None:
    assert run_ranks(problems_of_awkward_parameters, num_ranks) == [{}] * num_ranks


def problems_with_an_optimizer(stage: int) -> list[str]:
    """Runs on a rank: an edit between two steps of training, which the optimizer goes on from."""
    case, ranks = CASES["llama"], range(dist.get_world_size())
    pair = make_pair("llama", stage)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, foreach=False) for model in pair]
    for step in range(3):
        for rank in ranks:
            (case.loss(pair[0], case.batch(step, rank)) / len(ranks)).backward()
        case.loss(pair[1], case.batch(step, dist.get_rank())).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 1:
            with torch.no_grad():
                by_index(pair[0])
            with edited(pair, lambda model: model.lm_head.weight):
                by_index(pair[1])
    return wrong_rows(pair)


def test_training_goes_on_from_a_change() -> None:
    for stage in (1, 2, 3):
        assert run_ranks(problems_with_an_optimizer, 2, stage) == [[], []]


def facts_of_forward_inside(stage: int, is_late: bool) -> list[Any]:
    """Runs on a rank: a forward of the whole model between two changes, inside."""
    pair = make_pair("llama", stage, is_late)
    with edited(pair, lambda model: model), torch.no_grad():
        by_index(pair[0])
        by_index(pair[1])
        is_equal = is_forward_equal(pair, "llama")
        is_whole = type(pair[1].lm_head.weight) is nn.Parameter and not isinstance(pair[1].lm_head.weight, DTensor)
        in_place(pair[0])
        in_place(pair[1])
    return [is_equal, is_whole, wrong_rows(pair), is_forward_equal(pair, "llama")]


@pytest.mark.parametrize(
    ("stage", "is_late"),
    [
        (1, False),
        (3, False),
        (3, True),
    ],
)
def test_forward_inside_sees_changes(stage: int, is_late: bool) -> None:
    assert run_ranks(facts_of_forward_inside, 2, stage, is_late) == [[True, True, [], True]] * 2


def use_in_forward(kind: str) -> None:
    """Runs on a rank: gathers a parameter that a forward has in use, or that is whole already."""
    _, model = make_pair("llama", 3, timeout_s=5)
    held = model.lm_head.weight
    if kind == "gathered":
        with hf_zero.GatheredParameters(held), hf_zero.GatheredParameters(held):
            pass
    model.lm_head.register_forward_pre_hook(lambda *_: hf_zero.GatheredParameters(held).__enter__())
    CASES["llama"].loss(model, CASES["llama"].batch(0, 0))


@pytest.mark.parametrize("kind", ["forward", "gathered"])
def test_a_parameter_in_use_is_refused(kind: str) -> None:
    for failure in run_ranks(use_in_forward, 2, kind, expect_failure=True):
        assert isinstance(failure, RankFailure) and failure.type_name == "UsageError", failure
        assert "lm_head.weight" in failure.message and "in use" in failure.message


# --- changes that are not -------------------------------------------------------------------------------------------


def exchanges_without_a_change(stage: int, modifier_rank: int | None) -> list[Any]:
    """Runs on a rank: kinds of exchange inside and at the end, versions and epochs, when nothing was changed."""
    pair = make_pair("llama", stage)
    is_forward_equal(pair, "llama")
    model, ledger = pair[1], ledger_of(pair[1])
    engine = hf_zero.engine_of(model)
    before = [param._version for param in model.parameters()], [unit.epoch for unit in engine.units]
    ledger.reset()
    with hf_zero.GatheredParameters(model, modifier_rank):
        model.lm_head.weight.sum()
        inside = ledger.kinds()
        units = {unit for kind, unit in ledger.entries if kind == "gather"}
        ledger.reset()
    after = [param._version for param in model.parameters()], [unit.epoch for unit in engine.units]
    return [inside, units, ledger.kinds(), before == after, wrong_rows(pair), is_forward_equal(pair, "llama")]


@pytest.mark.parametrize("modifier_rank", [None, 1])
def test_nothing_is_sent_when_nothing_was_changed(modifier_rank: int | None) -> None:
    for stage in (1, 3):
        for inside, units, at_end, is_unchanged, wrong, is_equal in run_ranks(
            exchanges_without_a_change, 2, stage, modifier_rank
        ):
            assert set(inside) <= {"agree", "gather"} and units == {"whole parameters"}
            assert at_end == ("agree",)
            assert is_unchanged and wrong == [] and is_equal


def exchanges_of_a_change(modifier_rank: int | None) -> list[Any]:
    """Runs on a rank: bytes broadcast and units refreshed when one of three parameters was changed."""
    _, model = make_pair("llama", 1)
    engine, ledger = hf_zero.engine_of(model), ledger_of(model)
    layer = model.model.layers[0]
    chosen = [layer.input_layernorm.weight, layer.mlp.up_proj.weight, model.lm_head.weight]
    before = [unit.epoch for unit in engine.units]
    with hf_zero.GatheredParameters(chosen, modifier_rank), torch.no_grad():
        ledger.reset()
        if modifier_rank in (None, dist.get_rank()):
            model.lm_head.weight[-1] = 7.0
    changed = [unit.name for unit, epoch in zip(engine.units, before, strict=True) if unit.epoch != epoch]
    head = next(unit for unit in engine.units if unit.name in changed)
    gathered = {unit for kind, unit in ledger.entries if kind == "gather"}
    return [ledger.total("broadcast").bytes, changed == [head.name], gathered == {head.name}]


def test_only_what_changed_is_sent() -> None:
    assert run_ranks(exchanges_of_a_change, 2, None) == [[0, True, True]] * 2
    assert run_ranks(exchanges_of_a_change, 2, 1) == [[4 * 37 * 16, True, True], [0, True, True]]


def facts_after_an_exception(stage: int) -> list[Any]:
    """Runs on a rank: rank 1 raises inside, after both have changed something."""
    pair = make_pair("llama", stage)
    model, held = pair[1], pair[1].lm_head.weight
    with pytest.raises(ValueError, match="no"), edited(pair, lambda model: model.lm_head):
        model.lm_head.weight.fill_(3.0)
        raise ValueError("no")
    facts = [model.lm_head.weight is held, held.placements[0].is_shard(), wrong_rows(pair)]
    with edited(pair, lambda model: model.lm_head):
        model.lm_head.weight.fill_(4.0)
    with torch.no_grad():
        pair[0].lm_head.weight.fill_(4.0)
    return [*facts, wrong_rows(pair), is_forward_equal(pair, "llama")]


def test_nothing_is_written_back_after_an_exception() -> None:
    for stage in (1, 3):
        assert run_ranks(facts_after_an_exception, 2, stage) == [[True, True, [], [], True]] * 2


# --- misuse ---------------------------------------------------------------------------------------------------------


def misuse(kind: str) -> None:
    """Runs on a rank: a wrong use, which raises."""
    _, model = make_pair("llama", 3, timeout_s=2)
    if kind == "foreign":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("mine",))
        hf_zero.GatheredParameters(nn.Parameter(distribute_tensor(torch.ones(4), mesh))).__enter__()
    elif kind == "no such rank":
        hf_zero.GatheredParameters(model.lm_head.weight, modifier_rank=2).__enter__()
    elif kind == "one rank only" and dist.get_rank() == 0:
        with hf_zero.GatheredParameters(model.lm_head.weight):
            pass
    elif kind == "one rank only":
        import time

        time.sleep(4)  # a rank that goes on with its own work


def test_a_dtensor_that_hf_zero_did_not_make_is_refused() -> None:
    for failure in run_ranks(misuse, 2, "foreign", expect_failure=True):
        assert isinstance(failure, RankFailure) and failure.type_name == "UsageError", failure
        assert "not made by hf_zero" in failure.message


def test_a_modifier_rank_that_does_not_exist_is_refused() -> None:
    for failure in run_ranks(misuse, 2, "no such rank", expect_failure=True):
        assert isinstance(failure, RankFailure) and failure.type_name == "UsageError", failure
        assert "modifier_rank=2" in failure.message and "0 to 1" in failure.message


def test_a_rank_that_enters_alone_is_told_who_is_missing() -> None:
    failure, other = run_ranks(misuse, 2, "one rank only", expect_failure=True)
    assert isinstance(failure, RankFailure) and failure.type_name == "CollectiveError", failure
    assert "rank 1" in failure.message and "whole parameters" in failure.message
    assert other is None


def facts_of_plain_ones() -> list[Any]:
    """Runs on a rank: what is plain, or not to be gathered, stays what it is; a parameter of a closed engine too."""
    linear = nn.Linear(3, 5)
    with hf_zero.GatheredParameters(linear), torch.no_grad():
        linear.weight.fill_(2.0)
    _, model = make_pair("llama", 3)
    held = model.lm_head.weight
    with hf_zero.GatheredParameters(model, enabled=False):
        is_shard = model.lm_head.weight is held
    with hf_zero.GatheredParameters([]):
        pass
    hf_zero.engine_of(model).close()
    with hf_zero.GatheredParameters(held), torch.no_grad():
        model.lm_head.weight.fill_(2.0)
    return [bool((linear.weight == 2).all()), is_shard, bool((held.to_local() == 2).all())]


def test_plain_parameters_and_enabled_false_are_left_alone() -> None:
    assert run_ranks(facts_of_plain_ones, 2) == [[True, True, True]] * 2


def test_everything_is_plain_in_a_world_of_one() -> None:
    assert run_alone(plain_world, 3) == [True, True]


def plain_world(stage: int) -> list[bool]:
    pair = make_pair("llama", stage)
    with edited(pair, lambda model: model.lm_head):
        pair[1].lm_head.weight.fill_(2.0)
    with torch.no_grad():
        pair[0].lm_head.weight.fill_(2.0)
    return [wrong_rows(pair) == [], is_forward_equal(pair, "llama")]


def nested() -> list[Any]:
    """Runs on a rank: one context in another, for other parameters."""
    pair = make_pair("llama", 3)
    reference, model = pair
    with edited(pair, lambda model: model.lm_head):
        model.lm_head.weight.fill_(2.0)
        with edited(pair, lambda model: model.model.norm):
            model.model.norm.weight.fill_(3.0)
        is_whole = type(model.lm_head.weight.data) is Tensor
    with torch.no_grad():
        reference.lm_head.weight.fill_(2.0)
        reference.model.norm.weight.fill_(3.0)
    whole = gather_whole(model.lm_head.weight)
    return [is_whole, wrong_rows(pair), same_bits(whole, reference.lm_head.weight)]


def test_contexts_nest() -> None:
    assert run_ranks(nested, 2) == [[True, [], True]] * 2


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


def facts_of_apply(stage: int, is_late: bool, name: str) -> list[Any]:
    """Runs on a rank: `apply` of a function that looks, and of one that does deterministic maths in place."""
    reference, model = pair = make_pair(name, stage, is_late)
    is_forward_equal(pair, name) if not is_late else None
    ledger = ledger_of(model)
    ledger.reset()
    addresses = [local_of(param).data_ptr() for param in model.parameters()]
    versions = [param._version for param in model.parameters()]
    model.apply(look_only)
    facts = [ledger.kinds(), versions == [param._version for param in model.parameters()]]
    model.apply(scale_and_fill)
    reference.apply(scale_and_fill)
    facts += [ledger.kinds(), addresses == [local_of(param).data_ptr() for param in model.parameters()]]
    facts.append(wrong_rows(pair))
    facts.append(is_forward_equal(pair, name))
    return facts


@pytest.mark.parametrize(("num_ranks", "stage", "is_late"), [(2, 3, False), (3, 3, True), (2, 1, False), (2, 2, True)])
def test_apply_of_deterministic_maths_needs_no_exchange(num_ranks: int, stage: int, is_late: bool) -> None:
    for name in ("llama", "gpt2"):
        facts = run_ranks(facts_of_apply, num_ranks, stage, is_late, name)
        assert facts == [[(), True, (), True, [], True]] * num_ranks


def apply_to_awkward_shapes() -> list[str]:
    reference, model = AwkwardMLP(), AwkwardMLP()
    model.load_state_dict(reference.state_dict())
    hf_zero.shard_model(model, {"stage": 3})
    for module in (reference, model):
        module.apply(scale_and_fill)
    if dist.get_rank():
        return []  # models were drawn one after the other, so only the values of rank 0 are known
    return wrong_rows((reference, model))


def test_apply_knows_uneven_rows() -> None:
    assert run_ranks(apply_to_awkward_shapes, 3) == [[]] * 3


def use_gathered_part(stage: int) -> bool:
    """Runs on a rank: forwards and `generate` while a part of the model is whole, after forwards that are foretold."""
    pair = make_pair("llama", stage)
    assert is_forward_equal(pair, "llama")
    with hf_zero.GatheredParameters([pair[1].lm_head.weight, *pair[1].model.layers[0].parameters()]):
        while_whole = is_forward_equal(pair, "llama")
        ids = torch.arange(6)[None]
        written = [model.generate(ids, max_new_tokens=4, do_sample=False) for model in pair]
    return while_whole and torch.equal(*written) and is_forward_equal(pair, "llama")


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_of_which_a_part_is_gathered_computes(stage: int) -> None:
    assert run_ranks(use_gathered_part, 2, stage) == [True, True]
