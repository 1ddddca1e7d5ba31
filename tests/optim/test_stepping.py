"""Any optimizer steps as in one process: on rows where it is elementwise, elsewhere on whole parameters by their owners."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from peft.optimizers.lorafa import LoraFAOptimizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hf_zero as zero
from hf_zero.checkpoint.export import whole_state_dict
from hf_zero.engine.engine import engine_of
from hf_zero.engine.parameters import on_host
from hf_zero.optim.by_owners import OwnerStepping
from hf_zero.optim.kinds import is_elementwise
from hf_zero.optim.owners import spread
from tests.engine.twins import SHARDED, Twins
from tests.ranks import by_hand, next_turn, on_ranks, run_alone, run_ranks

STEPS = 3
Make = Callable[[nn.Module], torch.optim.Optimizer]


class Classifier(nn.Module):
    """Rows that divide by nothing, vectors, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 24)
        self.body = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 24, bias=False))
        self.head = nn.Linear(24, 7)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.embed(ids)).mean(1))
        return logits


class Plain(torch.optim.Optimizer):
    """What the optimizers below share: a step that sees one plain parameter at a time."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.num_steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    assert not isinstance(param, DTensor)
                    assert not isinstance(param.grad, DTensor)
                    param.sub_(group["lr"] * self.update(param, param.grad, self.state[param]))
        return loss

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class Trusting(Plain):
    """LARS-like: steps as long as the parameter's norm says."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return grad * (param.norm().item() / (grad.norm().item() + 1e-8))


class Orthogonal(Plain):
    """The sign of QR and SVD factors, with momentum made from a shape."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if "momentum" not in state:
            state["momentum"] = torch.zeros(param.shape)
        momentum: Tensor = state["momentum"].mul_(0.9).add_(grad)
        if param.ndim < 2:
            return momentum
        u, _, v = torch.linalg.svd(momentum, full_matrices=False)
        return u @ v * torch.linalg.qr(momentum)[1].diagonal().abs().mean()


class Robust(Plain):
    """Median, sorting and indexing; factored and nested states, and one that is an object."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state["sides"] = [torch.zeros(size) for size in param.shape]
            state["seen"] = {"last": torch.zeros(3), "count": 0}
            state["limit"] = Limit(torch.ones(2))
        for dim, side in enumerate(state["sides"]):
            side.mul_(0.5).add_(
                grad.abs().mean([d for d in range(grad.ndim) if d != dim]) if grad.ndim > 1 else grad.abs()
            )
        state["seen"]["last"] = grad.flatten().sort().values[:3].clone()
        state["seen"]["count"] += 1
        state["limit"].values.add_(grad.flatten()[0].abs())
        scale = (
            grad.median().abs()
            + state["sides"][0].mean()
            + state["limit"].values.sum()
            + state["seen"]["last"].abs().sum()
        )
        grad = grad.clone()
        grad[-1] = 0
        return grad / scale


class Limit:
    """An object in a state."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


class Around(Plain):
    """Moves parameters before it evaluates its closure, and once more between two evaluations, as SAM does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        for sign in (1, -1):
            for param in (p for group in self.param_groups for p in group["params"]):
                param.add_(sign * 0.01)
            with torch.enable_grad():
                loss = closure()
            for param in (p for group in self.param_groups for p in group["params"]):
                param.sub_(self.param_groups[0]["lr"] * param.grad / (param.grad.norm() + 1e-6))
        return loss


class Outer(torch.optim.Optimizer):
    """Lookahead: wraps another optimizer, whose groups it shares."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.inner = inner
        self.param_groups = inner.param_groups
        self.slow: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        for param in params:
            self.state[param].setdefault("slow", param.clone())
        self.inner.step()
        for param in params:
            slow = self.state[param]["slow"].lerp_(param, 0.5)
            param.copy_(slow)


class Renamed(torch.optim.AdamW):
    """Only another name: still elementwise."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2, foreach=True)


class Normed(torch.optim.SGD):
    """Not elementwise any more: it divides by norms before it does what its base does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in (p for group in self.param_groups for p in group["params"]):
            param.grad.div_(param.grad.norm())
        return super().step(closure)


class GlobalNorm(Plain):
    """Looks across parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for param in params:
            param.sub_(0.1 * param.grad / norm)


class ByPlace(Plain):
    """GrokAdamW-like: the later a parameter comes, the less it remembers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for place, param in enumerate(p for p in group["params"] if p.grad is not None):
                mean = self.state[param].setdefault("mean", torch.zeros(param.shape))
                param.sub_(group["lr"] * mean.lerp_(param.grad, 1 - 0.9 * 0.8**place))


class Marked(Plain):
    """Elementwise, and marked so."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        state.setdefault("mean", torch.zeros_like(param)).lerp_(grad, 0.5)
        return state["mean"].sign() * 0.1


zero.mark_elementwise(Marked)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.ndim == 2]


def torch_one(name: str, **options: Any) -> Make:
    return lambda model: getattr(torch.optim, name)(model.parameters(), **{"lr": 1e-2, **options})


ROWS: dict[str, Make] = {
    **{
        name: torch_one(name)
        for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
    },
    "Adam": torch_one("Adam", foreach=False),
    "AdamW": torch_one("AdamW", foreach=True, amsgrad=True),
    "momentum": torch_one("SGD", lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "renamed": lambda model: Renamed(model.parameters()),
    "marked": lambda model: Marked(model.parameters()),
}
WHOLE: dict[str, Make] = {
    "Adafactor": torch_one("Adafactor"),
    "Adafactor of transformers": lambda model: transformers.optimization.Adafactor(model.parameters()),
    "Muon": lambda model: torch.optim.Muon(matrices(model), lr=1e-2),
    "trusting": lambda model: Trusting(model.parameters()),
    "orthogonal": lambda model: Orthogonal(model.parameters()),
    "robust": lambda model: Robust(model.parameters()),
    "around": lambda model: Around(model.parameters()),
    "outer": lambda model: Outer(Trusting(model.parameters())),
    "normed": lambda model: Normed(model.parameters(), lr=0.1),
    "groups": lambda model: Trusting([{"params": [p], "lr": 0.01 * i} for i, p in enumerate(model.parameters())]),
}


def backward(model: nn.Module, number: int) -> Tensor:
    """Only rank 0 has a loss, so that sums over the ranks have one term, and the bits of one process."""
    draw = torch.Generator().manual_seed(number)
    ids, labels = torch.randint(31, (8, 5), generator=draw), torch.randint(7, (8,), generator=draw)
    is_heard = not dist.is_initialized() or dist.get_rank() == 0 or model.__dict__.get("is_oracle")
    loss: Tensor = nn.functional.cross_entropy(model(ids), labels) * (1.0 if is_heard else 0.0)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def train(model: nn.Module, optimizer: Any, steps: Iterable[int] = range(STEPS)) -> None:
    for number in steps:

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad()
            return backward(model, number)

        if isinstance(optimizer, Around):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def make(stage: int | None = None, **options: Any) -> Classifier:
    torch.manual_seed(0)
    model = Classifier()
    if stage is None:
        model.__dict__["is_oracle"] = True
    else:
        config = {"stage": stage, "collectives": "pairwise", "gradient_reduction": "sum", "timeout_s": 20}
        zero.shard_model(model, {**config, **options})
    return model


def furthest(model: nn.Module, wanted: nn.Module) -> float:
    weights = whole_state_dict(model)
    return max(float((weights[name] - value).abs().max()) for name, value in wanted.state_dict().items())


def assert_like_one_process(name: str, where: str, stage: int, **options: Any) -> None:
    factory = (ROWS if name in ROWS else WHOLE)[name]
    oracle, model = make(), make(stage, **options)
    ours = factory(model)
    train(oracle, factory(oracle))
    train(model, ours)
    assert furthest(model, oracle) == 0.0, name
    is_whole = isinstance(vars(ours)["_zero_stepping"], OwnerStepping)
    assert ("whole" if is_whole else "rows") == where, name
    assert all(isinstance(param, DTensor) for group in ours.param_groups for param in group["params"]), name
    assert getattr(ours, "num_steps", STEPS) in (STEPS, 0), name


def assert_all_like_one_process(*stages: int) -> None:
    """Each optimizer in one of the stages, in turn."""
    for kinds, where in ((ROWS, "rows"), (WHOLE, "whole")):
        for name, stage in zip(kinds, itertools.cycle(stages)):
            assert_like_one_process(name, where, stage)


@on_ranks(2, stages=[(1, 3), *by_hand((3, 1))])
def test_any_optimizer_equals_one_process_bit_for_bit(stages: tuple[int, int]) -> None:
    assert_all_like_one_process(*stages)


@pytest.mark.slow
@on_ranks(2)
def test_any_optimizer_equals_one_process_bit_for_bit_in_stage_2() -> None:
    assert_all_like_one_process(2)


@pytest.mark.slow
@on_ranks(3)
def test_any_optimizer_equals_one_process_bit_for_bit_on_three_ranks() -> None:
    assert_all_like_one_process(3)


@on_ranks(4, name=["Muon", "AdamW"])
def test_any_optimizer_steps_among_replicas(name: str) -> None:
    assert_like_one_process(name, "rows" if name in ROWS else "whole", 3, replicate=2)


@on_ranks(2, name=["AdamW", "Rprop"])
def test_users_choose_that_an_optimizer_steps_on_whole_parameters(name: str) -> None:
    assert_like_one_process(name, "whole", 2, optimizer_on="whole")


# --- what is refused ----------------------------------------------------------------------------------------------------


@on_ranks(
    2,
    case=[
        ("norm", "when another has another gradient"),
        ("place", "by its place in the list"),
        ("lbfgs", "one search direction"),
        ("adapters", "computes the step of one matrix of an adapter from the other"),
    ],
)
def test_an_optimizer_that_looks_across_parameters_is_an_error(case: tuple[str, str]) -> None:
    kind, why = case
    model = make(3)
    if kind == "adapters":
        names, params = zip(*model.named_parameters(), strict=True)
        optimizer: Any = LoraFAOptimizer([{"params": params, "names": names, "scaling_factor": 1.0, "lr": 0.1}])
    else:
        kinds: dict[str, Any] = {"norm": GlobalNorm, "place": ByPlace, "lbfgs": torch.optim.LBFGS}
        optimizer = kinds[kind](model.parameters())
    with pytest.raises(zero.UsageError, match=why) as caught:
        train(model, optimizer)
    assert "optimizer_on: every_rank" in str(caught.value)


class Lomo:
    """As lomo_optim: hooks that change parameters."""

    def __init__(self, model: nn.Module) -> None:
        for param in model.parameters():
            param.register_hook(self.hook())  # type: ignore[no-untyped-call]

    def hook(self) -> Callable[[Tensor], Tensor]:
        def func(gradient: Tensor) -> Tensor:
            return gradient

        return func


def lomo_before_or_after(is_first: bool) -> None:
    model = Classifier()
    if is_first:
        Lomo(model)
    zero.shard_model(model, {"stage": 2, "collectives": "pairwise"})
    Lomo(model)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_step_fused_into_the_backward_is_an_error(is_first: bool) -> None:
    failures = run_ranks(lomo_before_or_after, 2, is_first, expect_failure=True)
    # A rank may still be gathering when the other has raised and ended.
    assert any("Lomo changes parameters while the backward runs" in failure.message for failure in failures)
    assert {failure.type_name for failure in failures} <= {"UsageError", "CollectiveError"}


def test_classes_are_told_apart() -> None:
    param = nn.Parameter(torch.ones(2, 2))
    for name in ROWS:
        assert is_elementwise(ROWS[name](nn.Linear(2, 2))), name
    for made in (Normed([param], lr=1.0), Trusting([param]), Outer(Trusting([param])), torch.optim.Muon([param])):
        assert not is_elementwise(made), type(made)
    assert not is_elementwise(Outer(torch.optim.SGD([param], lr=0.1)))


class Failing(Plain):
    """Fails in the middle of its second step, on the rank that owns the embedding."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if self.num_steps == 2:
            raise ArithmeticError("no step today")
        return grad


@on_ranks(2)
def test_a_step_that_fails_leaves_the_optimizer_as_it_was() -> None:
    model = make(3, optimizer_on="rows")
    optimizer = Failing(model.parameters())
    held = [id(param) for param in optimizer.param_groups[0]["params"]]
    with pytest.raises(ArithmeticError):
        train(model, optimizer)
    assert [id(param) for param in optimizer.param_groups[0]["params"]] == held
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert type(copy.deepcopy(optimizer)) is Failing


@on_ranks(2)
def test_a_state_dict_of_all_owners_that_has_no_room_is_refused() -> None:
    model = make(2)
    optimizer = Orthogonal(model.parameters(), lr=0.1)
    train(model, optimizer, range(1))
    with (
        mock.patch.object(on_host, "available_bytes", lambda: 1000),
        pytest.raises(zero.UsageError, match=r"states of all parameters.* where 1,000 are available: call it on the"),
    ):
        optimizer.state_dict()


@on_ranks(2)
def test_a_state_dict_has_the_states_of_all_owners() -> None:
    """Saved by all ranks, or by rank 0 alone, it goes on as if nothing had happened; so does a plain optimizer."""
    model = make(2)
    optimizer = Orthogonal(model.parameters(), lr=0.1)
    assert not optimizer.state_dict()["state"]
    train(model, optimizer, range(2))
    by_all, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(whole_state_dict(model))
    alone = copy.deepcopy(optimizer.state_dict()) if dist.get_rank() == 0 else by_all
    train(model, optimizer, range(2, 4))
    assert list(by_all["state"]) == list(alone["state"]) == list(range(len(list(model.parameters()))))
    torch.testing.assert_close(by_all, alone, rtol=0, atol=0)
    again = make(3)
    again.load_state_dict(weights)
    its = Orthogonal(again.parameters(), lr=0.1)
    its.load_state_dict(by_all)
    train(again, its, range(2, 4))
    torch.testing.assert_close(whole_state_dict(again), whole_state_dict(model), rtol=0, atol=0)
    assert sum(map(len, its.state.values())) < sum(map(len, by_all["state"].values()))  # each rank keeps its own


# --- exchanges ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_owners_receive_rows_and_send_them_back() -> None:
    model = make(3)
    engine = engine_of(model)
    assert engine is not None
    optimizer = torch.optim.Muon(matrices(model), lr=1e-2)
    train(model, optimizer, range(1))
    ledger = engine.world.ledger
    ledger.reset()
    train(model, optimizer, range(1, 2))
    psi = 4 * sum(param.numel() for param in matrices(model))
    for kind, unit in (("to_owners", "parameters"), ("to_owners", "gradients"), ("from_owners", "parameters")):
        # Psi (N - 1) / N^2 a rank, on average: what one owner does not receive, the other does.
        total = torch.tensor(ledger.entries[kind, unit].bytes)
        dist.all_reduce(total)
        assert abs(total - psi / 2) <= 4 * 40 * 4, (kind, unit, total)  # but for rows that do not divide


@pytest.mark.parametrize("num_ranks", [8, 64])
def test_owners_of_a_llama_8b_have_equal_work(num_ranks: int) -> None:
    attention = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)]
    loads = [0] * num_ranks
    spread([*attention, (14336, 4096), (14336, 4096), (4096, 14336)] * 32, loads)
    assert max(loads) <= 1.1 * sum(loads) / num_ranks


def test_every_parameter_has_an_owner_whatever_its_shape() -> None:
    loads = [0, 0]
    owners = spread([(0, 3), (), (5,), (2, 0), (3, 2, 2)], loads)
    assert len(owners) == 5
    assert sorted(loads) == [6, 12]


# --- states: frozen layers, loading, checkpoints --------------------------------------------------------------------------


@on_ranks(2, optimizer_class=[Orthogonal, Marked])
def test_layers_unfrozen_later_and_whole_states_that_are_loaded(optimizer_class: type[Plain]) -> None:
    oracle, model = make(), make(3)
    optimizers = []
    for each in (oracle, model):
        each.body.requires_grad_(False)
        optimizer = optimizer_class([p for p in each.parameters() if p.requires_grad])
        train(each, optimizer, range(2))
        each.body.requires_grad_(True)
        optimizer.add_param_group({"params": list(each.body.parameters()), "lr": 0.02})
        train(each, optimizer, range(2, 4))
        optimizers.append(optimizer)
    state = copy.deepcopy(optimizers[0].state_dict())
    fresh = optimizer_class([p for p in model.parameters() if id(p) not in set(map(id, model.body.parameters()))])
    fresh.add_param_group({"params": list(model.body.parameters())})
    fresh.load_state_dict(state)  # whole, as a plain run saves it
    train(oracle, optimizers[0], range(4, 6))
    train(model, fresh, range(4, 6))
    assert furthest(model, oracle) == 0.0


SAVED: dict[str, Make] = {name: WHOLE[name] for name in ("orthogonal", "robust", *by_hand("Adafactor"))}


def accelerated(factory: Make, stage: int, **options: Any) -> tuple[Any, Classifier, Any]:
    plugin = zero.ZeroPlugin(stage=stage, collectives="pairwise", gradient_reduction="sum", timeout_s=20, **options)
    accelerator = zero.ZeroAccelerator(zero_plugin=plugin)
    torch.manual_seed(0)
    model = Classifier()
    model, optimizer = accelerator.prepare(model, factory(model))
    return accelerator, model, optimizer


def save_after_two(folder: Path, stage: int) -> None:
    for name in SAVED:
        next_turn()
        accelerator, model, optimizer = accelerated(SAVED[name], stage)
        train(model, optimizer, range(2))
        accelerator.save_state(str(folder / name))


def go_on(folder: Path, stage: int) -> None:
    for name in SAVED:
        next_turn()
        oracle = make()
        train(oracle, SAVED[name](oracle))
        accelerator, model, optimizer = accelerated(SAVED[name], stage)
        accelerator.load_state(str(folder / name))
        train(model, optimizer, range(2, STEPS))
        assert furthest(model, oracle) == 0.0, name


def test_states_of_owners_are_saved_and_resume_on_other_ranks_and_stages(tmp_path: Path) -> None:
    run_ranks(save_after_two, 2, tmp_path / "two", 3)
    run_ranks(go_on, 3, tmp_path / "two", 1)
    run_alone(go_on, tmp_path / "two", 3)
    run_alone(save_after_two, tmp_path / "one", 2)
    run_ranks(go_on, 2, tmp_path / "one", 2)


@on_ranks(2, stage=SHARDED)
def test_a_compiled_step_is_a_step(stage: int) -> None:
    twins = Twins(stage, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True))
    step = torch.compile(twins.optimizers[0].step, backend="eager")
    for _ in range(2):
        twins.backward()
        twins.backward_reference()
        step()
        twins.optimizers[1].step()
        for optimizer in twins.optimizers:
            optimizer.zero_grad()
        twins.steps_done += 1
    twins.assert_same_output()
