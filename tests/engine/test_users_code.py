"""What users' code does to parameters, gradients and steps, beside the same code on the unsharded model."""

import collections
import contextlib
import copy
import gc
import io
import time
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hf_zero as zero
from hf_zero import torch_compat
from hf_zero.engine.ranks.world import World, world_that_cut
from tests.engine.twins import EXCHANGES, SHARDED, STAGES, Net, Twins, assert_same, batch, square_loss, whole
from tests.ranks import on_ranks

# ---- edits -----------------------------------------------------------------------------------------------------------


def _both(twins: Twins, code: Callable[[nn.Module], None]) -> None:
    """Run a user's code on both models."""
    code(twins.model)
    code(twins.reference)
    assert_same(twins.model, twins.reference)


def _mul(model: nn.Module) -> None:
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(0.5)
        model.head.bias.fill_(1.0)


def _data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.mul_(0.9)
        param.data.add_(param.detach(), alpha=0.1)


def _foreach(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.9)


def _assign_data(model: nn.Module) -> None:
    model.head.weight.data = model.head.weight.data * 0.5
    model.head.bias.data = torch.arange(3.0)


def _vector(model: nn.Module) -> None:
    if all(isinstance(param, DTensor) for param in model.parameters()):
        vector = torch.cat([whole(param).reshape(-1) for param in model.parameters()])
    else:
        vector = parameters_to_vector(model.parameters()).detach()
    vector_to_parameters(vector * 0.5, model.parameters())


def _alias_kept(model: nn.Module) -> None:
    aliases = model.__dict__.setdefault("aliases", [param.data for param in model.parameters()])
    for alias in aliases:
        alias.mul_(0.95)


def _rows_of_the_other_dim(model: nn.Module) -> None:
    with torch.no_grad():
        model.head.weight[:, 1:].zero_()
        model.head.weight.view(3, 5).add_(0.1)


_EDITS = [_mul, _data, _foreach, _assign_data, _vector, _alias_kept, _rows_of_the_other_dim]


@on_ranks(2, stage=STAGES, collectives=EXCHANGES)
def test_edits_by_hand_mean_what_they_mean_on_the_plain_model(stage: int, collectives: str) -> None:
    twins = Twins(stage, collectives=collectives, timeout_s=20)
    for edit in _EDITS:
        for mode in (contextlib.nullcontext(), torch.device("cpu")):  # which sees torch's functions first
            with mode:
                _both(twins, edit)
            twins.assert_same_output()
            twins.step()


@on_ranks(2, stage=STAGES, collectives=EXCHANGES)
def test_an_optimizer_written_by_hand_trains(stage: int, collectives: str) -> None:
    def step(model: nn.Module) -> None:
        for param in model.parameters():
            param.data.add_(param.grad, alpha=-0.1)
            param.grad = None

    twins = Twins(stage, collectives=collectives, timeout_s=20)
    for _ in range(3):
        twins.backward()
        twins.backward_reference()
        _both(twins, step)
        twins.steps_done += 1


@on_ranks(2, stage=SHARDED)
def test_random_edits_draw_what_the_plain_model_would_draw(stage: int) -> None:
    def redraw(model: nn.Module) -> None:
        torch.manual_seed(3)
        nn.init.xavier_uniform_(model.blocks[1].up.weight)
        model.enter.weight.data.normal_(0, 0.5)
        with torch.no_grad():
            model.head.weight.add_(torch.randn_like(model.head.weight), alpha=0.1)

    twins = Twins(stage)
    _both(twins, redraw)
    twins.step()


@on_ranks(2, stage=SHARDED)
def test_edits_of_slices_arrive_and_those_that_would_be_lost_raise(stage: int) -> None:
    twins = Twins(stage)
    weight = twins.model.head.weight
    for model in (twins.model, twins.reference):
        with torch.no_grad():
            model.head.weight[0].add_(1.0)
            model.head.weight.data.t()[1:, 2].mul_(2.0)
    twins.step()
    for wrong in (torch.zeros(4, 5), torch.zeros(3, 5, dtype=torch.float64)):
        with pytest.raises(zero.UsageError, match=r"'head.weight' is partitioned as"):
            weight.data = wrong
    with pytest.raises(zero.UsageError, match="share_memory_"):
        twins.model.share_memory()
    twins.step()


@on_ranks(2, stage=[0, 1, 2, 3])
def test_what_torch_saves_is_whole_and_loads_anywhere(stage: int) -> None:
    def made(seed: int, stage: int | None) -> tuple[Net, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = Net()
        if stage is not None:
            zero.shard_model(model, {"stage": stage})
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model: Net, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = square_loss(model, batch(step, dist.get_rank()))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer = made(0, stage)
    train(model, optimizer, range(2))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = train(model, optimizer, range(2, 4))
    file.seek(0)
    saved = torch.load(file)
    tensors = [
        *saved["model"].values(),
        *(value for state in saved["optimizer"]["state"].values() for value in state.values()),
    ]
    assert {type(tensor) for tensor in tensors} == {Tensor}
    again, plain = made(1, stage), made(2, None)
    for other, its_optimizer in (again, plain):
        other.load_state_dict(saved["model"])
        its_optimizer.load_state_dict(saved["optimizer"])
    assert train(*again, range(2, 4)) == expected
    assert square_loss(plain[0], batch(2, dist.get_rank())).item() == expected[0]
    with pytest.raises(zero.UsageError, match=r"cannot be pickled \(torch.save\(model\).*save `model.state_dict"):
        torch.save(model, io.BytesIO())


def _seeded(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@on_ranks(2, stage=[1, 3])
def test_rank_0_alone_saves_weights_and_optimizers_by_torch(stage: int) -> None:
    twins = Twins(stage, optimizer=_adamw)
    twins.step()
    optimizer, reference = twins.optimizers
    file, expected = io.BytesIO(), copy.deepcopy((twins.reference.state_dict(), reference.state_dict()["state"]))
    if dist.get_rank() == 0:
        torch.save((twins.model.state_dict(), optimizer.state_dict()["state"]), file)
        first = twins.model.enter.weight
        assert optimizer.state[first]["exp_avg"].detach().sum().item() != 0  # also what is computed of one
        with pytest.raises(zero.UsageError, match=r"runs this alone.*its optimizers' states can be read by one rank"):
            (optimizer.state[first]["exp_avg"] * 2).tolist()
    twins.step()
    if dist.get_rank() == 0:
        file.seek(0)
        torch.testing.assert_close(torch.load(file), (dict(expected[0]), expected[1]))


@on_ranks(2, stage=[0, 1, 3])
def test_an_optimizer_that_was_loaded_first_is_saved_before_its_first_step(stage: int) -> None:
    torch.manual_seed(0)
    trained = Net()
    optimizer = _adamw(trained)
    square_loss(trained, batch(0, 0)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    expected, model = copy.deepcopy(optimizer.state_dict()), Net()
    again = _adamw(model)
    again.load_state_dict(optimizer.state_dict())
    zero.shard_model(model, stage)
    if dist.get_rank() == 0:
        torch.testing.assert_close(again.state_dict(), expected, rtol=0, atol=0)
    square_loss(model, batch(1, 0)).backward()  # type: ignore[no-untyped-call]
    again.step()
    assert not stage or all(isinstance(state["exp_avg"], DTensor) for state in again.state.values())


@on_ranks(2, stage=SHARDED, is_alone=[False, True])
def test_tied_weights_are_saved_once(stage: int, is_alone: bool) -> None:
    def make() -> nn.Module:
        model = Net()
        model.blocks[1].up.weight = model.blocks[0].up.weight
        return model

    twins = Twins(stage, make)
    for _ in range(2):
        twins.step()
        if is_alone and twins.rank:
            continue
        files = [io.BytesIO(), io.BytesIO()]
        for file, model in zip(files, (twins.model, twins.reference), strict=True):
            torch.save(model.state_dict(), file)
            file.seek(0)
        assert abs(files[0].getbuffer().nbytes - files[1].getbuffer().nbytes) < 1024
        loaded = torch.load(files[0])
        torch.testing.assert_close(loaded, dict(twins.reference.state_dict()))
        assert loaded["blocks.0.up.weight"].data_ptr() == loaded["blocks.1.up.weight"].data_ptr()
    dist.barrier()


@on_ranks(2, stage=[1, 3])
def test_rank_0_alone_saves_copies_and_averages_that_all_ranks_have_made(stage: int) -> None:
    twins = Twins(stage, optimizer=_adamw)
    averages = [
        (copy.deepcopy(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)))
        for model in (twins.model, twins.reference)
    ]
    for _ in range(3):
        twins.step()
        for (by_hand, average), model in zip(averages, (twins.model, twins.reference), strict=True):
            average.update_parameters(model)
            with torch.no_grad():
                for mean, param in zip(by_hand.parameters(), model.parameters(), strict=True):
                    mean.sub_((mean - param) * torch.tensor(0.25))
    best = [copy.deepcopy(model.state_dict()) for model in (twins.model, twins.reference)]
    kept = [{name: value.clone() for name, value in state.items()} for state in best]
    ours, theirs = ([*map(nn.Module.state_dict, averages[i]), best[i], kept[i]] for i in (0, 1))
    fleeting = {name: param.detach().cpu().clone().to(torch.bfloat16) for name, param in twins.model.named_parameters()}
    if dist.get_rank():
        fleeting.clear()  # as when a function returns whose result only rank 0 uses
    else:
        wanted = {name: param.detach().to(torch.bfloat16) for name, param in twins.reference.named_parameters()}
        torch.testing.assert_close({name: value.full_tensor() for name, value in fleeting.items()}, wanted)
    if dist.get_rank() == 0:
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        torch.testing.assert_close(torch.load(file), list(map(dict, theirs)))
        with torch.no_grad():
            own = twins.model.head.weight.detach() * 3  # which the other rank does not compute
            both = best[0]["head.weight"].mul_(2)  # which it leaves as it is
        torch.testing.assert_close(own.full_tensor(), twins.reference.head.weight.detach() * 3)
        torch.testing.assert_close(both.full_tensor(), best[1]["head.weight"] * 2)
    twins.step()


@on_ranks(2, stage=[1, 3], is_whole=[False, True])
def test_rank_0_alone_copies_an_average_into_the_model_and_saves_that(stage: int, is_whole: bool) -> None:
    """As scripts of diffusers do at their end: `if accelerator.is_main_process: ema.copy_to(unet.parameters())`."""
    twins = Twins(stage, collectives="pairwise")
    averages = [[p.detach().clone() for p in model.parameters()] for model in (twins.model, twins.reference)]
    if is_whole:
        averages[0] = [p.clone().detach() for p in twins.model.parameters()]  # in the graph, so whole and plain
    for _ in range(2):
        twins.step()
        for means, model in zip(averages, (twins.model, twins.reference), strict=True):
            for mean, param in zip(means, model.parameters(), strict=True):
                mean.sub_(0.5 * (mean - param.detach()))
    expected = [mean.clone() for mean in averages[1]]
    if dist.get_rank() == 0:
        for param, mean in zip(twins.model.parameters(), averages[0], strict=True):
            param.data.copy_(mean.to(param.device).data)
        file = io.BytesIO()
        torch.save(twins.model.state_dict(), file)
        file.seek(0)
        torch.testing.assert_close(list(torch.load(file).values()), expected)
        with torch.no_grad():
            twins.model.head.bias.add_(1)
        with pytest.raises(zero.CollectiveError, match="rank 0 has changed a model alone"):
            twins.model.head.bias.tolist()
    dist.barrier()


@on_ranks(2)
def test_what_is_changed_past_all_that_is_noted_is_not_given() -> None:
    """Each rank has a value twice, and changes one of them by `to_local`: the other is given."""
    twins = Twins(2)
    with torch.no_grad():
        values = [twins.model.head.weight.detach() * 2 for _ in range(2)]
        values[dist.get_rank()].to_local().add_(1.0)
        if dist.get_rank() == 0:
            torch.testing.assert_close(values[1].full_tensor(), twins.reference.head.weight.detach() * 2)
            with pytest.raises(zero.UsageError, match="only a model's parameters"):
                values[0].tolist()
    twins.step()


@on_ranks(2, way=["gathered", "forward"])
def test_a_copy_is_of_the_weights_before_they_were_changed(way: str) -> None:
    twins = Twins(3, collectives="pairwise")
    old: Tensor | None = twins.model.head.weight.detach().clone()
    if dist.get_rank():
        old = None  # others need not keep what is as the weights are
    if way == "gathered":
        with zero.GatheredParameters(twins.model.head), torch.no_grad():
            twins.model.head.weight.mul_(2)
    else:
        twins.model.head.register_forward_pre_hook(_double)
        with torch.no_grad():
            twins.model(twins.own()[0] if isinstance(twins.own(), tuple) else twins.own())
    if old is not None:
        with pytest.raises(zero.CollectiveError, match="it has no such value"):
            old.tolist()
    dist.barrier()


def _double(module: nn.Module, args: object) -> None:
    with torch.no_grad():
        module.weight.mul_(2)  # type: ignore[operator, union-attr]


@on_ranks(2)
def test_copies_of_two_models_are_told_apart() -> None:
    models = [Twins(2, collectives="pairwise", make=lambda seed=seed: _seeded(seed)) for seed in (1, 2)]  # type: ignore[misc]
    copies = [twins.model.head.weight.detach().clone() for twins in models]
    if dist.get_rank() == 0:
        torch.testing.assert_close(copies[0].full_tensor(), models[0].reference.head.weight.detach())
    else:
        del copies[0]  # it still has the other
    dist.barrier()


@on_ranks(2, stage=[2, 3])
def test_a_copy_that_is_trained_is_no_longer_what_it_was_a_copy_of(stage: int) -> None:
    twins = Twins(stage, collectives="pairwise")
    trained = copy.deepcopy(twins.model)
    kept = None if dist.get_rank() else twins.model.head.weight.detach().clone()
    zero.shard_model(trained, zero.ZeroConfig(stage=stage, collectives="pairwise"))
    optimizer = _adamw(trained)
    square_loss(trained, twins.own()).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    if kept is not None:
        torch.testing.assert_close(kept.full_tensor(), twins.reference.head.weight.detach())
    dist.barrier()


class Slow(Net):
    """Takes its time between reading the first and the last parameters."""

    delay_s = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            time.sleep(self.delay_s)
            x = block(x)
        return self.head(x)


def _swap(model: nn.Module, others: dict[str, Tensor]) -> None:
    """Exchange the values of a model with `others`, as averages are swapped in and out; no rank meets another here."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            before = param.detach().clone()
            param.data.copy_(others[name])
            others[name] = before


@on_ranks(2, timeout_s=120, stage=SHARDED)
def test_averages_swapped_in_and_out_never_reach_a_peer_that_still_computes(stage: int) -> None:
    twins = Twins(stage, Slow, collectives="host", timeout_s=30)
    models = (twins.model, twins.reference)
    averages = [{name: param.detach().clone().mul_(2) for name, param in model.named_parameters()} for model in models]
    for late_rank in (0, 1):
        twins.model.delay_s = 0.05 if twins.rank == late_rank else 0.0
        for _ in range(2):
            with torch.no_grad():
                torch.testing.assert_close(twins.model(batch(9, 9)), twins.reference(batch(9, 9)))
            for model, others in zip(models, averages, strict=True):
                _swap(model, others)
        twins.step()


@on_ranks(2, stage=STAGES)
def test_frozen_parameters_changed_inside_gathered_parameters_are_new_on_every_rank(stage: int) -> None:
    def make() -> nn.Module:
        model = Net()
        model.enter.requires_grad_(False)
        return model

    twins = Twins(stage, make)
    twins.step()
    with zero.GatheredParameters(list(twins.model.enter.parameters())), torch.no_grad():
        twins.model.enter.weight.mul_(2)
    with torch.no_grad():
        twins.reference.enter.weight.mul_(2)
    twins.assert_same_output()
    twins.step()


# ---- lists of parameters and buffers ---------------------------------------------------------------------------------


def _with_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def _values_of(model: nn.Module) -> list[Tensor]:
    return [value for value in model.state_dict().values() if value.is_floating_point()]


@on_ranks(2, stage=STAGES)
def test_averages_of_parameters_and_buffers_together(stage: int) -> None:
    torch.manual_seed(0)
    plain = _with_statistics()
    model = copy.deepcopy(plain)
    zero.shard_model(model, {"stage": stage, "timeout_s": 20})
    pairs = [(each, copy.deepcopy(each)) for each in (plain, model)]
    for each, average in pairs:
        with torch.no_grad():
            torch._foreach_mul_(_values_of(each), 1.5)
            torch._foreach_lerp_(_values_of(average), _values_of(each), 0.25)
            torch._foreach_add_(_values_of(average), torch._foreach_mul(_values_of(each), 2.0), alpha=0.5)
    for left, right in zip(_values_of(pairs[0][1]), _values_of(pairs[1][1]), strict=True):
        torch.testing.assert_close(whole(right), left)


# ---- gradients and steps ---------------------------------------------------------------------------------------------


def _accumulate(twins: Twins, order: str, between: Callable[[nn.Module], None] | None = None) -> None:
    """Backward passes with (s) and without (n) a reduction; the reference does what DDP does with `.grad`."""
    sums = [[torch.zeros_like(p) for p in twins.reference.parameters()] for _ in range(twins.num_ranks)]
    for letter in order:
        with twins.model.no_sync() if letter == "n" else contextlib.nullcontext():
            twins.backward()
        for rank, own in enumerate(sums):
            twins.reference.zero_grad()
            twins.loss(twins.reference, twins.draw(twins.steps_done, rank)).backward()
            for total, param in zip(own, twins.reference.parameters(), strict=True):
                total.add_(param.grad)
        if letter == "s":
            for each in zip(*sums, strict=True):
                mean = sum(each) / len(each)
                for total in each:
                    total.copy_(mean)
        if between is not None:
            between(twins.model)
            for own in sums:
                for param, total in zip(twins.reference.parameters(), own, strict=True):
                    param.grad = total
                between(twins.reference)
        twins.steps_done += 1
    for param, total in zip(twins.reference.parameters(), sums[0], strict=True):
        param.grad = total.clone()
    for left, right in zip(twins.model.parameters(), twins.reference.parameters(), strict=True):
        grad = left.grad.full_tensor() if isinstance(left.grad, DTensor) else left.grad
        torch.testing.assert_close(grad, right.grad, rtol=1e-5, atol=1e-6)
    twins.update()


@on_ranks(2, 3, order=["ns", "snns", "nsns", "ssnnns"], stage=[0, 1])
def test_every_order_of_sync_and_no_sync_accumulates_as_ddp_does(order: str, stage: int) -> None:
    twins = Twins(stage, compute_dtype="float32")
    _accumulate(twins, order)
    _accumulate(twins, order, _halve_gradients)


def _halve_gradients(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad.mul_(0.5)


class _OneOfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False).requires_grad_(False)

    def forward(self, x: Tensor, trains: bool) -> Tensor:
        return self.trained(x) if trains else self.frozen(x)


@on_ranks(2, stage=[0, 1])
def test_a_backward_that_reaches_frozen_parameters_alone_reduces_what_no_sync_has_kept(stage: int) -> None:
    model = _OneOfTwo()
    zero.shard_model(model, {"stage": stage, "timeout_s": 20})
    x = torch.full((1, 3), dist.get_rank() + 1.0, requires_grad=True)
    with model.no_sync():
        model(x, True).sum().backward()
    own = torch_compat.local_of(model.trained.weight.grad).clone()
    for end in (
        lambda loss: torch.autograd.grad(loss, x),
        lambda loss: loss.backward(inputs=[x]),
    ):
        end(model(x, False).sum())
        assert torch.equal(torch_compat.local_of(model.trained.weight.grad), own)  # neither asks for all gradients
    model(x, False).sum().backward()
    assert torch.equal(whole(model.trained.weight.grad), torch.full((2, 3), 1.5))


@on_ranks(2, stage=[0, 1, 2, 3])
def test_a_layer_frozen_after_no_sync_is_reduced_with_the_others_and_is_in_their_norm(stage: int) -> None:
    model, reference = (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    zero.shard_model(model, {"stage": stage, "timeout_s": 20})
    mine, rows = (torch.full((1, 3), dist.get_rank() + 1.0), [torch.full((1, 3), rank + 1.0) for rank in range(2)])
    with model.no_sync():
        if dist.get_rank() == 1 or stage > 1:  # some ranks may have kept nothing of it
            model(mine).sum().backward()
    (sum(reference(x).sum() for x in (rows if stage > 1 else rows[1:])) / 2).backward()
    for each in (model, reference):
        each[0].requires_grad_(False)
    model(mine).sum().backward()
    (sum(reference(x).sum() for x in rows) / 2).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert torch.allclose(norm, nn.utils.clip_grad_norm_(reference.parameters(), 1e9))
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(whole(param.grad), expected.grad)


@on_ranks(2, stage=SHARDED)
def test_what_takes_the_address_of_a_tensor_at_rest_gets_an_error(stage: int) -> None:
    model = nn.Linear(4, 4)
    zero.shard_model(model, {"stage": stage})
    weight = model.weight
    alone, _ = dist.new_subgroups(1)
    for tensor in (weight.detach(), weight.detach() * 2, weight.detach()[1:]):  # torch looks into no list of lists
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            dist.scatter(torch.empty(tensor.shape), [tensor], src=dist.get_rank(), group=alone)


@on_ranks(2, stage=SHARDED)
def test_hooks_of_parameters_see_and_change_gradients(stage: int) -> None:
    twins = Twins(stage)
    calls: list[str] = []

    def hook(model: nn.Module, kind: str) -> None:
        def halve(grad: Tensor) -> Tensor:
            calls.append(kind)
            assert grad.shape == model.head.weight.shape and not isinstance(grad, DTensor)
            return grad * 0.5

        model.head.weight.register_hook(halve)
        handle = model.enter.bias.register_hook(lambda grad: grad * 100)
        handle.remove()

    hook(twins.model, "own")
    hook(twins.reference, "reference")
    twins.step(2)
    assert calls.count("own") == 2 and calls.count("reference") == 2 * twins.num_ranks


@on_ranks(2, stage=[1, 2, 3])
def test_a_model_whose_hooks_know_it_goes_when_nobody_holds_it(stage: int) -> None:
    def train() -> weakref.ref[World]:
        model = Net()
        zero.shard_model(model, {"stage": stage})
        model.head.weight.register_hook(lambda grad: grad * len(list(model.parameters())))
        model.head.bias.register_post_accumulate_grad_hook(lambda param: model.zero_grad())
        model(batch(0, 0)).sum().backward()
        return weakref.ref(world_that_cut(model.head.weight))

    world = train()
    for _ in range(2):  # what a graph's node holds goes with the node, and what it is in a cycle with the next time
        gc.collect()
    assert world() is None


@on_ranks(2, stage=SHARDED)
def test_optimizer_in_backward_trains(stage: int) -> None:
    twins = Twins(stage)

    def attach(model: nn.Module) -> None:
        optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

        def step(param: Tensor) -> None:
            optimizers[param].step()
            param.grad = None

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step)

    attach(twins.model)
    for _ in range(3):
        twins.backward()
        for param in twins.model.parameters():
            assert param.grad is None
        twins.backward_reference()
        with torch.no_grad():
            for param in twins.reference.parameters():
                param.sub_(0.1 * param.grad)
                param.grad = None
        twins.steps_done += 1
        assert_same(twins.model, twins.reference)


@on_ranks(2, stage=SHARDED)
def test_backward_gives_gradients_to_the_inputs_named(stage: int) -> None:
    twins = Twins(stage)
    for _ in range(2):
        square_loss(twins.model, twins.own()).backward(inputs=[twins.model.head.weight, twins.model.blocks[0].up.bias])
        assert [name for name, p in twins.model.named_parameters() if p.grad is not None] == [
            "blocks.0.up.bias",
            "head.weight",
        ]
        twins.model.zero_grad()
    twins.step()


@on_ranks(2)
def test_gradients_under_no_sync_are_cleared_by_fused_optimizers() -> None:
    twins = Twins(1)
    optimizer = torch.optim.AdamW(twins.model.parameters(), fused=True)
    with twins.model.no_sync():
        twins.backward()
    optimizer.zero_grad(set_to_none=False)
    assert not any(param.grad.to_local().any() for param in twins.model.parameters())
    twins.step()


@on_ranks(2, stage=SHARDED)
def test_whole_states_of_a_plain_adam_are_cut_when_they_are_loaded(stage: int) -> None:
    twins = Twins(stage)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (twins.model, twins.reference)]
    optimizers[1] = torch.optim.AdamW(twins.reference.parameters(), lr=0.01, fused=True)
    twins.optimizers = optimizers
    twins.backward_reference()
    optimizers[1].step()
    twins.model.load_state_dict(twins.reference.state_dict())
    optimizers[0].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    twins.reference.zero_grad()
    twins.step(2)
    state = optimizers[0].state_dict()
    state["state"][0]["exp_avg"] = torch.zeros(9, 3)
    optimizers[0].load_state_dict(state)
    twins.backward()
    with pytest.raises(zero.PartitionError, match=r"'exp_avg' of 'enter.weight'"):
        optimizers[0].step()


@on_ranks(2, stage=SHARDED, collectives=EXCHANGES)
def test_steps_that_change_other_parameters_or_run_the_model_are_seen(stage: int, collectives: str) -> None:
    twins = Twins(stage, collectives=collectives, timeout_s=20)
    twins.optimizers = []
    for model in (twins.model, twins.reference):
        optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_, model=model: model.head.weight.data.mul_(0.5))
        twins.optimizers.append(optimizer)
    twins.step(2)
    twins.assert_same_output()
    for optimizer, model in zip(twins.optimizers, (twins.model, twins.reference), strict=True):

        def closure(model: nn.Module = model) -> Tensor:
            with torch.no_grad():
                model(batch(5, 5))
                return model(batch(6, 6)).sum()

        optimizer.zero_grad()
        twins.loss(model, batch(1, 1)).backward()
        optimizer.step(closure)
        model.zero_grad()
    assert_same(twins.model, twins.reference)


# ---- hooks, and what modules see -------------------------------------------------------------------------------------


@on_ranks(2, stage=STAGES, collectives=EXCHANGES)
def test_noise_that_hooks_add_and_take_back_is_only_in_the_forward(stage: int, collectives: str) -> None:
    """Hooks that were registered after the model was partitioned."""
    twins = Twins(stage, collectives=collectives)

    kept: dict[nn.Module, Tensor] = {}

    def add(module: nn.Module, _: object) -> None:
        kept[module] = module.weight.data.clone()
        module.weight.data.add_(0.5)

    def take_back(module: nn.Module, *_: object) -> None:
        module.weight.data.copy_(kept[module])

    def noisy(model: nn.Module) -> None:
        for layer in (model.blocks[1].up, model.head):
            layer.register_forward_pre_hook(add)
            layer.register_forward_hook(take_back)

    _both(twins, noisy)
    twins.step(2)


class _Looking(nn.Linear):
    """Its forward looks at its last gradient."""

    def forward(self, x: Tensor) -> Tensor:
        grad = self.weight.grad
        return super().forward(x) * (1.0 if grad is None else 1 + grad.norm())


@on_ranks(2, stage=SHARDED)
def test_a_forward_sees_the_last_gradient(stage: int) -> None:
    torch.manual_seed(0)
    model, plain = (nn.Sequential(_Looking(3, 4), nn.Linear(4, 2)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    zero.shard_model(model, {"stage": stage})
    for _ in range(3):
        losses = [each(torch.ones(2, 3)).square().mean() for each in (model, plain)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()


@on_ranks(2, stage=SHARDED)
def test_flags_that_change_under_a_call_are_an_error_that_says_what_to_do(stage: int) -> None:
    class Frozen(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.requires_grad_(True)  # changes nothing
            self.weight.requires_grad_(False)
            return super().forward(x)

    model = nn.Sequential(Frozen(3, 3))
    zero.shard_model(model, {"stage": stage})
    with pytest.raises(zero.UsageError, match=r"requires_grad_\(\) of a parameter in a forward .*weight.detach\(\)"):
        model(torch.ones(2, 3))


@on_ranks(2, stage=STAGES)
def test_versions_count_steps(stage: int) -> None:
    """Users keep what they have computed of a weight until its `_version` is another."""

    class Kept(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            known = getattr(self.weight, "known", None)
            if known is None or known[0] != self.weight._version:
                self.weight.known = known = (self.weight._version, self.weight.detach().norm())
            return super().forward(x) / known[1]

    torch.manual_seed(0)
    model, plain = (nn.Sequential(Kept(3, 4), nn.Linear(4, 2)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    zero.shard_model(model, {"stage": stage})
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, plain)]
    for _ in range(4):
        version = model[0].weight._version
        for _ in range(2):
            losses = [each(torch.ones(2, 3)).square().mean() for each in (model, plain)]
        torch.testing.assert_close(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert model[0].weight._version > version


@on_ranks(2, stage=SHARDED)
def test_all_forward_hooks_may_be_taken_away_for_an_evaluation(stage: int) -> None:
    model = Net()
    zero.shard_model(model, {"stage": stage})
    kept = model.head._forward_hooks
    model.head._forward_hooks = collections.OrderedDict()
    with torch.no_grad():
        first = model(batch(0, 0))
        model.head._forward_hooks = kept
        torch.testing.assert_close(model(batch(0, 0)), first)
