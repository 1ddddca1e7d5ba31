"""What users run around forwards and steps, beside the same code on the unsharded model: searches, threads, lifetimes."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hf_zero as zero
from tests.engine.test_users_code import Slow
from tests.engine.twins import EXCHANGES, Block, Net, Twins, assert_same, batch, square_loss, whole
from tests.models import CASES, make_model
from tests.ranks import by_hand, on_ranks

ENDS = (1, 3)

# ---- steps -----------------------------------------------------------------------------------------------------------


class LineSearch(torch.optim.Optimizer):
    """Goes along the gradient, looks where that leads, and goes back by as much as it has found there."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
        """Two edits of all parameters, and a forward after each."""
        for factor in (-0.1, 0.01):
            for param in self.param_groups[0]["params"]:
                param.add_(param.grad, alpha=factor)
            loss = closure()
        for param in self.param_groups[0]["params"]:
            param.data.add_(param.grad, alpha=0.05 * float(loss))


@on_ranks(2, stage=ENDS, collectives=EXCHANGES)
def test_a_line_search_sees_its_own_edits_and_no_peer_sees_them_early(stage: int, collectives: str) -> None:
    twins = Twins(stage, Slow, collectives=collectives, timeout_s=20)
    searches = [(LineSearch(model.parameters()), model) for model in (twins.model, twins.reference)]
    for late_rank in (0, 1):
        twins.model.delay_s = 0.03 if twins.rank == late_rank else 0.0
        twins.backward()
        twins.backward_reference()
        for optimizer, model in searches:
            optimizer.step(lambda model=model: square_loss(model, batch(5, 5)))
            optimizer.zero_grad()
        twins.steps_done += 1
        assert_same(twins.model, twins.reference)


@on_ranks(2, stage=ENDS, collectives=EXCHANGES)
def test_parts_called_after_a_step_that_raised_see_what_it_has_changed(stage: int, collectives: str) -> None:
    twins = Twins(stage, collectives=collectives, timeout_s=20)
    twins.step()
    x = batch(5, 5)
    with torch.no_grad():
        twins.model(x)
    twins.backward()
    twins.backward_reference()
    for model in (twins.model, twins.reference):
        groups = [{"params": list(model.enter.parameters())}, {"params": list(model.head.parameters()), "betas": None}]
        with pytest.raises(TypeError):
            torch.optim.AdamW(groups, lr=0.1).step()
        model.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(twins.model.enter(x), twins.reference.enter(x))
    assert_same(twins.model, twins.reference)
    twins.step()


@on_ranks(2, stage=ENDS)
def test_lists_of_parameters_are_copied_from_lists_of_their_values(stage: int) -> None:
    twins = Twins(stage)
    twins.step()
    saved = [[p.detach().clone() for p in model.parameters()] for model in (twins.model, twins.reference)]
    twins.step()
    for model, values in zip((twins.model, twins.reference), saved, strict=True):
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), values)
    twins.assert_same_output()
    for model in (twins.model, twins.reference):
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), [torch.full(p.shape, 0.1) for p in model.parameters()])
    twins.assert_same_output()
    twins.step()


@on_ranks(2, stage=ENDS)
def test_whole_states_of_a_plain_adagrad_are_cut_when_they_are_loaded(stage: int) -> None:
    twins = Twins(stage)
    twins.optimizers = [torch.optim.Adagrad(model.parameters(), lr=0.1) for model in (twins.model, twins.reference)]
    twins.backward_reference()
    twins.optimizers[1].step()
    twins.reference.zero_grad()
    twins.model.load_state_dict(twins.reference.state_dict())
    twins.optimizers[0].load_state_dict(copy.deepcopy(twins.optimizers[1].state_dict()))
    twins.step(2)
    for ours, plain in zip(*(optimizer.state.values() for optimizer in twins.optimizers), strict=True):
        assert isinstance(ours["sum"], DTensor)
        torch.testing.assert_close(whole(ours["sum"]), plain["sum"])


# ---- compiled models -------------------------------------------------------------------------------------------------


class Tied(Net):
    """Reads weights of modules that it does not call; two modules share one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.out = nn.Linear(5, 7, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        x = x + self.out(x).tanh() @ self.table.weight * 0.1
        return nn.functional.linear(x, self.head.weight, self.head.bias)


@on_ranks(2, stage=ENDS, case=[(Net, "aot_eager"), (Tied, "eager")])
def test_compiled_models_train_as_others_do(stage: int, case: tuple[Callable[[], nn.Module], str]) -> None:
    make, backend = case
    compiled: list[Callable[[Tensor], Tensor]] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        is_ours = compiled and model is twins.model
        return (compiled[0] if is_ours else model)(x).pow(2).mean()

    twins = Twins(stage, make, loss, timeout_s=20)
    torch._dynamo.utils.counters.clear()
    try:
        compiled.append(torch.compile(twins.model, backend=backend))
        twins.step(2)
        compiled.clear()
        twins.model.compile(backend=backend)
        twins.step()
        twins.assert_same_output()
        if torch.__version__ >= "2.12":  # before, it compiles the call of a hooked module anew for each of its states
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 2
    finally:
        torch.compiler.reset()


@on_ranks(2, checkpoints=[*by_hand(False), True])
def test_compiled_blocks_are_one_graph_between_the_borders_of_their_unit(checkpoints: bool) -> None:
    model = make_model(CASES["llama"])
    if checkpoints:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    zero.shard_model(model, {"stage": 3, "units": ["LlamaDecoderLayer"]})
    optimizer = torch.optim.AdamW(model.parameters())
    counters, found = torch._dynamo.utils.counters, []
    try:
        for layer in model.model.layers:  # type: ignore[union-attr]
            layer.compile(backend="aot_eager")
        counters.clear()
        for step in range(3):
            model(**CASES["llama"].batch(step, dist.get_rank())).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
        assert found == [(1, 2)] * 3  # of all layers; before and after a call; none of them once more
    finally:
        torch.compiler.reset()


# ---- transforms of functions -----------------------------------------------------------------------------------------


class Transforming(Net):
    """Differentiates a function of its input: one that calls a block, or one inside a block."""

    how = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        first = self.blocks[0]
        match self.how:
            case "grad":
                x = x + torch.func.grad(lambda value: first(value).sum())(x)
            case "vmap":
                x = x + torch.func.vmap(first)(x)
            case "read":
                x = x + torch.func.grad(lambda value: (value @ self.head.weight.t()).pow(2).sum())(x)
            case "autograd":
                leaf = x.detach().requires_grad_()
                x = x + torch.autograd.grad(first(leaf).sum(), leaf)[0]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TransformingBlock(Block):
    how = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "inside":
            x = x + torch.func.grad(lambda value: torch.tanh(self.up(self.norm(value))).sum())(x)
            x = x + torch.func.vmap(lambda value: self.down(self.up(value)))(x)
        return super().forward(x)


def _transforming() -> nn.Module:
    model = Transforming()
    model.blocks[1] = TransformingBlock(5)
    return model


@on_ranks(2, case=[(1, "pairwise"), (3, "host"), (3, "pairwise")])
def test_functions_are_transformed_inside_a_block_and_refused_around_its_call(case: tuple[int, str]) -> None:
    stage, collectives = case
    twins = Twins(stage, _transforming, collectives=collectives, timeout_s=20)
    for how in ("grad", "vmap", "read"):
        twins.model.how = how
        with pytest.raises(zero.UsageError, match=r"torch.func.grad, vmap, .*use torch.autograd.grad"):
            twins.model(twins.own())
    for how in ("", "autograd", "inside", ""):
        for model in (twins.model, twins.reference):
            model.how = model.blocks[1].how = how
        if how == "inside" and (stage, collectives) == (3, "pairwise"):  # torch allows no saved-tensor hooks there
            with pytest.raises(RuntimeError, match="yet support saved tensor hooks"):
                twins.model(twins.own())
        else:
            twins.step()


# ---- threads, buffers, lifetimes -------------------------------------------------------------------------------------


class Watched(Net):
    """Lets a thread of the user look at the model while its forward runs."""

    look: Callable[[], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.enter(x))
        if self.look is not None:
            thread = threading.Thread(target=self.look)
            thread.start()
            thread.join()
        return nn.functional.linear(self.blocks[2](self.blocks[1](x)), self.head.weight, self.head.bias)


@on_ranks(2, stage=ENDS)
def test_another_thread_sees_parameters_at_rest_while_a_forward_runs(stage: int) -> None:
    twins = Twins(stage, Watched, timeout_s=10)
    twins.step()
    at_rest = dict(twins.model.named_parameters())
    looks: list[str] = []

    def look() -> None:
        before = twins.engine.world.ledger.total().calls
        assert all(param is at_rest[name] for name, param in twins.model.named_parameters())
        assert twins.model.head.weight is at_rest["head.weight"] and twins.model.enter.bias is at_rest["enter.bias"]
        assert twins.engine.world.ledger.total().calls == before
        looks.append("done")

    if twins.rank == 0:
        twins.model.look = look
    twins.step(2)
    assert len(looks) == (2 if twins.rank == 0 else 0)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.enter(x)))


@on_ranks(2, stage=ENDS)
def test_buffers_of_a_rank_stay_its_own_when_the_model_is_partitioned_anew(stage: int) -> None:
    twins = Twins(stage, Normed, broadcast_buffers=False)
    twins.step(2)
    own = twins.model.norm.running_mean.clone()
    twins.model.eval()
    with torch.no_grad():
        twins.model.head = nn.Linear(5, 3)
        twins.model.extra = nn.BatchNorm1d(5)
        twins.model.extra.running_mean.fill_(twins.rank + 1.0)
        twins.model(twins.own())
    assert zero.engine_of(twins.model) is not twins.engine
    assert torch.equal(twins.model.norm.running_mean, own)
    assert torch.equal(twins.model.extra.running_mean, torch.ones(5))
    own_rows = [torch.zeros(5) for _ in range(2)]
    torch.distributed.all_gather(own_rows, own)
    assert not torch.equal(*own_rows)


class Remembering(Net):
    """Keeps what it has computed, and so do its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x) + self.enter(x) @ self.scale + self.head.weight.sum()
        self.blocks[0].last = self.last
        return self.last


@on_ranks(2, stage=ENDS)
def test_a_model_that_keeps_its_output_is_freed_with_all_its_parts(stage: int) -> None:
    twins = Twins(stage, Remembering)
    twins.step(2)
    twins.model(twins.own())
    parts = [weakref.ref(module) for module in twins.model.modules()]
    twins.model = nn.Identity()
    twins.optimizers.clear()
    twins.engine = None  # type: ignore[assignment]
    gc.collect()
    assert not any(part() for part in parts)
