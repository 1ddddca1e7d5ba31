"""Steps whose states are on a disk have the bits of steps in memory; what cannot be streamed is named."""

from __future__ import annotations

import errno
import logging
import os
import resource
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hf_zero as zero
from hf_zero import torch_compat
from hf_zero.engine.parameters import on_disk
from hf_zero.optim.offloaded.from_disk import DiskStepping
from tests.engine.twins import SHARDED
from tests.ranks import alone, by_hand, on_ranks

STEPS = 4
DISK = {"optimizer": "disk", "path": tempfile.gettempdir(), "slot_bytes": "256KiB"}  # several chunks
ALL_ON_DISK = {**DISK, "parameters": "disk"}
Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


class Awkward(nn.Module):
    """A parameter that is larger than a slot, odd rows, fewer rows than ranks, a tied weight, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1001, 64)
        self.up, self.down = nn.Linear(64, 301), nn.Linear(301, 64, bias=False)
        self.norm = nn.LayerNorm(64)
        self.few = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(5, 3))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        hidden = self.norm(hidden + self.down(torch.relu(self.up(hidden))))
        logits = (hidden @ self.embed.weight.t())[..., :50].float()
        return (logits.logsumexp(-1).mean() + self.few.sum() * 0.01).float()


class Momentum(torch.optim.Optimizer):
    """Elementwise, of a user: writes to `.data`, drops gradients, counts in its group and in the state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["number"] = state.get("number", 0) + 1
                state["mean"] = state.get("mean", torch.zeros_like(param)) * 0.9 + param.grad
                param.data = param.data - 0.01 * state["mean"] * group["count"] / state["number"]
                param.grad = None
        return loss


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "adamw loop": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False, fused=False),
    "adam amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
    "sgd momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-2, centered=True, momentum=0.9),
    "rprop": lambda params: torch.optim.Rprop(params, lr=1e-2),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-2),
    "asgd": lambda params: torch.optim.ASGD(params, lr=1e-2),
    "a user's": lambda params: zero.mark_elementwise(Momentum)(params),
}


def _batch(step: int) -> Tensor:
    return (torch.arange(40).view(4, 10) * (step + 1)) % 1001


def _trained(
    config: dict[str, Any], make: Make, with_closure: bool = False, change: Callable[..., None] | None = None
) -> list[Tensor]:
    """Losses, weights and states, whole, of a short training."""
    torch.manual_seed(0)
    model = Awkward()
    zero.shard_model(model, {"collectives": "pairwise", **config})
    optimizer = make(model.parameters())
    losses: list[Tensor] = []

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = model(_batch(len(losses)))
        loss.backward()
        losses.append(loss.detach())
        return loss

    for step in range(STEPS):
        if with_closure:
            result = optimizer.step(evaluate)
            assert result is not None
        else:
            evaluate()
            optimizer.step()
        if change is not None:
            change(step, model, optimizer)
    states = [value for param in model.parameters() for _, value in sorted(optimizer.state[param].items())]
    values: list[Any] = [*losses, *model.parameters(), *states]
    values += [torch.as_tensor(group.get("count", 0)) for group in optimizer.param_groups]
    return [_whole(value) for value in values if isinstance(value, (Tensor, int, float))]


def _whole(value: Any) -> Tensor:
    whole = value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)
    return whole.detach().clone()


def _assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    for number, (one, other) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(one, other), (number, one.shape)


def _compare(stage: int, name: str, **config: Any) -> None:
    in_memory = _trained({"stage": stage, **config}, OPTIMIZERS[name])
    for offload in [DISK, ALL_ON_DISK] if stage == 3 else [DISK]:
        _assert_same(_trained({"stage": stage, "offload": offload, **config}, OPTIMIZERS[name]), in_memory)


@on_ranks(2, stage=SHARDED, name=["adamw", *by_hand("rprop"), "a user's"])
def test_elementwise_optimizers_have_the_bits_of_a_step_in_memory(stage: int, name: str) -> None:
    _compare(stage, name)


@pytest.mark.slow
@on_ranks(3, name=list(OPTIMIZERS))
def test_every_elementwise_optimizer_has_the_bits_of_a_step_in_memory_on_three_ranks(name: str) -> None:
    _compare(3, name)


@on_ranks(2, stage=[1, 3])
def test_masters_of_another_dtype_go_along(stage: int) -> None:
    _compare(stage, "adamw", compute_dtype="bfloat16")


@alone(name=["adamw", "a user's"])
def test_a_process_alone_streams_too(name: str) -> None:
    _compare(1, name)


@on_ranks(2)
def test_a_closure_is_evaluated_once() -> None:
    for name in ("adamw", "sgd momentum"):
        in_memory = _trained({"stage": 2}, OPTIMIZERS[name], with_closure=True)
        _assert_same(_trained({"stage": 2, "offload": DISK}, OPTIMIZERS[name], with_closure=True), in_memory)


def _freeze_and_edit(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What users do between steps."""
    weight = model.get_parameter("down.weight")
    if step == 0:
        weight.requires_grad_(False)
        optimizer.zero_grad()
        optimizer.state[model.get_parameter("up.weight")]["exp_avg"].mul_(0.5)
        with torch.no_grad():
            model.get_parameter("embed.weight").mul_(0.9)
    elif step == 1:
        weight.requires_grad_(True)
        optimizer.add_param_group({"params": [model.get_parameter("unused")], "lr": 0.5})
        optimizer.load_state_dict(optimizer.state_dict())
    elif step == 2:
        optimizer.param_groups[0]["amsgrad"] = False
        optimizer.param_groups[0]["lr"] = 0.3


def _groups(params: Iterable[Any]) -> torch.optim.Optimizer:
    known = list(params)  # but for `unused`, the second
    return torch.optim.AdamW([{"params": known[:1]}, {"params": known[2:], "lr": 0.2}], lr=1e-2)


@on_ranks(2)
def test_edits_between_steps_mean_what_they_mean_in_memory() -> None:
    for stage, offload in ((1, DISK), (3, ALL_ON_DISK)):
        in_memory = _trained({"stage": stage}, _groups, change=_freeze_and_edit)
        _assert_same(_trained({"stage": stage, "offload": offload}, _groups, change=_freeze_and_edit), in_memory)


@on_ranks(2)
def test_ratio_leaves_a_part_in_memory() -> None:
    in_memory = _trained({"stage": 2}, OPTIMIZERS["adamw"])
    on_disk = []

    def look(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        stepping = vars(optimizer)["_zero_stepping"]
        assert isinstance(stepping, DiskStepping)
        on_disk[:] = [name for name, param in model.named_parameters() if stepping.states.of(id(param))]

    for ratio, expected in ((0.0, []), (0.5, ["few", "unused", "embed.weight"])):
        found = _trained({"stage": 2, "offload": {**DISK, "ratio": ratio}}, OPTIMIZERS["adamw"], change=look)
        _assert_same(found, in_memory)
        assert sorted(on_disk) == sorted(expected)


@on_ranks(2)
def test_a_step_in_pieces_reads_and_writes_the_disk() -> None:
    """Not the mapping: what a slot has is what counts."""
    torch.manual_seed(0)
    model = Awkward()
    zero.shard_model(model, {"stage": 3, "collectives": "pairwise", "offload": ALL_ON_DISK})
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(_batch(0)).backward()
        optimizer.step()
    for param in model.parameters():
        assert param.grad is None or isinstance(param.grad, DTensor)
        if param.grad is not None and torch_compat.local_of(param).numel():
            assert param._zero_place.tensor.data_ptr() == torch_compat.local_of(param).data_ptr()  # type: ignore[attr-defined]
    state = optimizer.state[model.embed.weight]
    assert sorted(state) == ["exp_avg", "exp_avg_sq", "step"]
    assert float(state["step"]) == 2.0
    mapped = torch_compat.local_of(state["exp_avg"])
    assert not mapped.untyped_storage().resizable()  # memory of a file


# ---- what users' optimizers keep ---------------------------------------------------------------------------------------


class Kept(torch.optim.Optimizer):
    """Elementwise, of a user: what it keeps beside rows is chosen by a word."""

    def __init__(self, params: Any, kept: str) -> None:
        super().__init__(params, {"tensor": torch.zeros(()), "list": []})
        self.kept, self.counts, self.total = kept, {"steps": 0}, torch.zeros(2)
        self.cached: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.counts["steps"] += 1
        self.total += 1
        draw = torch.rand(()) if self.kept == "draws" else torch.tensor(0.5)
        for group in self.param_groups:
            group["tensor"].add_(1)
            group["list"].append(len(group["list"]))
            for param in group["params"]:
                if param.grad is not None:
                    self.move(param, group, draw)
        return loss

    def move(self, param: Tensor, group: dict[str, Any], draw: Tensor) -> None:
        state = self.state[param]
        state["mean"] = state.get("mean", torch.zeros_like(param)) * 0.9 + param.grad
        state["nested"] = {"count": state.get("nested", {"count": 0})["count"] + 1}
        if self.kept == "the gradient":
            state["before"], param.grad = param.grad, torch.zeros_like(param)
        if self.kept == "old values":
            old = state.get("old", torch.zeros_like(param))
            state["old"] = param.data
            param.data = param.data * 1.1 - 0.1 * old
        if self.kept == "several":
            state["history"] = [*state.get("history", []), state["mean"].clone()]
        if self.kept == "nothing at times":
            state["mean"] = state["mean"] if self.counts["steps"] % 2 else None
            state["mean"] = torch.zeros_like(param) if state["mean"] is None else state["mean"]
            state["flag"] = None
        if self.kept == "parameters":
            self.cached = self.cached or [param]
            param.sub_(0.01 * self.cached[0].flatten()[0])
        if self.kept == "another dtype" and self.counts["steps"] > 1:
            state["mean"] = state["mean"].double()
        if self.kept == "under a name":
            self.state["all"] = {"count": 1}  # type: ignore[index]
        factor = self.counts["steps"] + float(self.total[0]) + float(group["tensor"]) + len(group["list"])
        param.sub_((0.001 * factor * draw * state["mean"]).to(param.dtype))


def _kept(kept: str) -> Make:
    return lambda params: zero.mark_elementwise(Kept)(params, kept)


@on_ranks(2)
def test_what_a_step_counts_and_keeps_is_what_it_is_in_memory() -> None:
    for kept in ("counts", "the gradient", "old values", "nothing at times"):
        in_memory = _trained({"stage": 2}, _kept(kept))
        _assert_same(in_memory, _trained({"stage": 0}, _kept(kept)))  # plain parameters, and the optimizer itself
        _assert_same(_trained({"stage": 2, "offload": DISK}, _kept(kept)), in_memory)

    def objects(step: int, model: nn.Module, optimizer: Any) -> None:
        assert (optimizer.counts["steps"], float(optimizer.total[0])) == (step + 1, step + 1)
        assert optimizer.param_groups[0]["list"] == list(range(step + 1))
        assert optimizer.seen[0] is optimizer.counts and optimizer.seen[1] is optimizer.param_groups[0]["tensor"]

    def make(params: Any) -> torch.optim.Optimizer:
        optimizer: Any = _kept("counts")(params)
        optimizer.seen = (optimizer.counts, optimizer.param_groups[0]["tensor"])
        return optimizer  # type: ignore[no-any-return]

    _trained({"stage": 3, "offload": ALL_ON_DISK}, make, change=objects)


@on_ranks(2)
def test_what_cannot_be_kept_in_pieces_is_named() -> None:
    for kept, error in (
        ("draws", "comes to other values in pieces"),
        ("parameters", "comes to other values in pieces"),
        ("several", "keeps several tensors in one state"),
        ("under a name", "keeps a state under 'all', which is no parameter"),
        ("another dtype", "'mean' torch.float64 .* where it was torch.float32|comes to other|cannot be tried"),
    ):
        with pytest.raises((zero.UsageError, zero.OffloadError), match=error):
            _trained({"stage": 2, "offload": DISK}, _kept(kept))


@on_ranks(2)
def test_parameters_beside_the_model_step_once() -> None:
    def make(extra: nn.Parameter) -> Make:
        def made(params: Iterable[Any]) -> torch.optim.Optimizer:
            optimizer = torch.optim.AdamW([*params, extra], lr=1e-2)
            optimizer.register_step_pre_hook(lambda *_: setattr(extra, "grad", torch.ones(3)))
            return optimizer

        return made

    found = []
    for offload in ("none", DISK):
        extra = nn.Parameter(torch.ones(3))
        values = _trained({"stage": 2, "offload": offload}, make(extra))
        found.append([*values, extra.detach().clone()])
    assert not torch.equal(found[0][-1], torch.ones(3))
    _assert_same(*found)


@on_ranks(2)
def test_a_model_partitioned_anew_offloads_as_its_new_configuration_says() -> None:
    torch.manual_seed(0)
    model = Awkward()
    engine = zero.shard_model(model, {"stage": 2, "collectives": "pairwise"})
    optimizer = torch.optim.AdamW(model.parameters())
    for offload, is_streamed in (("none", False), (DISK, True), ("none", False)):
        engine.close()
        engine = zero.shard_model(model, {"stage": 2, "collectives": "pairwise", "offload": offload})
        model(_batch(0)).backward()
        optimizer.step()
        assert isinstance(vars(optimizer)["_zero_stepping"], DiskStepping) == is_streamed


class Raises(torch.optim.SGD):
    """Breaks off in the second step."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if float(self.param_groups[0]["lr"]) > 1:
            raise ValueError("broken off")
        return result


@on_ranks(2)
def test_a_step_that_broke_off_leaves_nothing_under_way() -> None:
    torch.manual_seed(0)
    model = Awkward()
    zero.shard_model(model, {"stage": 2, "collectives": "pairwise", "offload": DISK})
    optimizer = zero.mark_elementwise(Raises)(model.parameters(), lr=0.1, momentum=0.9)
    model(_batch(0)).backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 2.0
    with pytest.raises((ValueError, zero.OffloadError), match="broken off"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    assert all(bool(torch.isfinite(_whole(param)).all()) for param in model.parameters())


# ---- bad input -------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_cannot_be_streamed_is_named() -> None:
    def step_with(make: Make, closure: Any = None) -> None:
        model = Awkward()
        zero.shard_model(model, {"stage": 2, "collectives": "pairwise", "offload": DISK})
        optimizer = make([param for param in model.parameters() if param.ndim == 2])
        model(_batch(0)).backward()
        optimizer.step() if closure is None else optimizer.step(closure)

    with pytest.raises(zero.UsageError, match=r"Muon steps on whole parameters.*offload.optimizer: none"):
        step_with(lambda params: torch.optim.Muon(params))

    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            return super().step(closure)

    with pytest.raises(zero.OffloadError, match="evaluates its closure more than once a step"):
        step_with(lambda params: zero.mark_elementwise(Twice)(params), closure=lambda: 1.0)

    class Late(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for param in self.param_groups[0]["params"]:
                names = ["first", "late"] if param.numel() > 64 else ["first"]
                self.state[param].update({name: torch.zeros_like(param) for name in names})

    with pytest.raises(zero.OffloadError, match="has made the state 'late' in a later step than its first"):
        step_with(lambda params: zero.mark_elementwise(Late)(params))

    class Ahead(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for param in self.param_groups[0]["params"]:
                param.data.add_(0.1)
            with torch.enable_grad():
                loss = closure()
            for param in self.param_groups[0]["params"]:
                param.sub_(param.grad * 0.1)
            return loss

    with pytest.raises(zero.UsageError, match="runs its closure where they have moved"):
        step_with(lambda params: zero.mark_elementwise(Ahead)(params, lr=0.1), closure=lambda: 1.0)

    class Many(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for param in self.param_groups[0]["params"]:
                self.state[param].update({f"m{i}": torch.zeros_like(param) for i in range(17)})

    with pytest.raises(zero.OffloadError, match="262,144, which holds no 4,096 elements of the 17 states"):
        step_with(lambda params: zero.mark_elementwise(Many)(params))

    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ValueError("too small")

    with pytest.raises(zero.UsageError, match=r"cannot be tried in pieces on tiny parameters.*ValueError: too small"):
        step_with(lambda params: zero.mark_elementwise(Fails)(params))


@on_ranks(2)
def test_a_full_disk_is_an_error_on_all_ranks_before_anything_changes() -> None:
    model = Awkward()
    zero.shard_model(model, {"stage": 3, "collectives": "pairwise", "offload": DISK})
    optimizer = torch.optim.AdamW(model.parameters())
    before = [_whole(param) for param in model.parameters()]
    model(_batch(0)).backward()
    allocate = os.posix_fallocate

    def fail(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if torch.distributed.get_rank() == 1:
        os.posix_fallocate = fail  # type: ignore[assignment]
    try:
        with pytest.raises(zero.OffloadError, match=r"has no room for [\d,]+ bytes of this rank .* No space left"):
            optimizer.step()
    finally:
        os.posix_fallocate = allocate
    _assert_same([_whole(param) for param in model.parameters()], before)
    optimizer.step()  # there is room now
    assert not torch.equal(_whole(model.embed.weight), before[2])


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"stage": 0, "offload": {"optimizer": "host"}}, "has no effect in stage 0"),
        ({"stage": 2, "offload": {"parameters": "host"}}, "has no effect in stage 2"),
        ({"offload": {"optimizer": "disk"}}, "'offload.path': None is missing"),
        ({"offload": {"optimizer": "nvme", "path": "/x"}}, "use none, host, disk"),
        ({"offload": {"optimiser": "disk"}}, "'optimiser' is not one of its keys"),
        ({"offload": "disk"}, "use none, or {optimizer: disk, path: /scratch}"),
        ({"offload": {"optimizer": "host", "ratio": 1.5}}, "is above 1"),
        ({"offload": {"path": "/x"}}, "offloads nothing, though other keys say how"),
        ({"offload": {"optimizer": "disk", "path": " "}}, "is not a folder"),
        ({"offload": {"optimizer": "host", "slots": 2}}, "at least 3"),
        ({"offload": {"optimizer": "host", "slot_bytes": 10}}, "at least 262144"),
        ({"offload": {"optimizer": "cpu", "pin": 1}}, "'offload.pin': 1 is not a boolean"),
        ({"offload": {**DISK, "pin": False}}, "'offload.pin': False is about host memory"),
        ({"offload": ALL_ON_DISK, "collectives": "host"}, "keeps parameters in memory"),
        ({"offload": DISK, "async_save": True}, "copies what is saved into memory"),
    ],
)
def test_bad_values_are_named(config: dict[str, Any], error: str) -> None:
    with pytest.raises(zero.ConfigError, match=error):
        zero.ZeroConfig.from_dict(config)


def test_a_config_with_offload_is_written_and_read_back(tmp_path: Path) -> None:
    config = zero.ZeroConfig(offload=ALL_ON_DISK)  # type: ignore[arg-type]
    assert zero.ZeroConfig.from_dict(config.to_dict()) == config
    assert zero.ZeroConfig().to_dict()["offload"] == "none"


def test_cpu_is_another_word_for_host() -> None:
    config = zero.ZeroConfig.from_dict({"offload": {"optimizer": "cpu", "parameters": "cpu"}})
    assert config == zero.ZeroConfig.from_dict({"offload": {"optimizer": "host", "parameters": "host"}})


@on_ranks(2)
def test_on_cpu_ranks_host_changes_nothing_and_says_so_once() -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hf_zero.engine.parameters.on_disk")
    on_disk._say_once.cache_clear()  # earlier tests of this process may have heard it
    logger.addHandler(handler)
    try:
        in_memory = _trained({"stage": 3}, OPTIMIZERS["adamw"])
        for _ in range(2):
            offload = {"optimizer": "cpu", "parameters": "cpu"}
            _assert_same(_trained({"stage": 3, "offload": offload}, OPTIMIZERS["adamw"]), in_memory)
    finally:
        logger.removeHandler(handler)
    known = [text for text in said if "these ranks compute on the CPU" in text]
    assert len(known) == (2 if torch.distributed.get_rank() == 0 else 0)


@alone()
def test_parameters_of_a_process_alone_stay() -> None:
    model = Awkward()
    model.unused = nn.Parameter(torch.ones(4, 6).t())  # only a process alone keeps such a parameter as it is
    zero.shard_model(model, {"stage": 1, "offload": DISK})
    optimizer = torch.optim.AdamW(model.parameters())
    model(_batch(0)).backward()
    with pytest.raises(zero.OffloadError, match="'unused' is not contiguous"):
        optimizer.step()
    with pytest.raises(zero.ConfigError, match="there is one rank, which computes with the parameters where they lie"):
        zero.shard_model(Awkward(), {"offload": ALL_ON_DISK})


# ---- memory ----------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """8 M parameters: 32 MiB, as large a gradient, and twice as much of moments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _train_within(offload: Any, num_bytes: int) -> list[float]:
    """Train with so many bytes of private memory beyond what the process has (RLIMIT_DATA: files do not count)."""
    status = Path("/proc/self/status").read_text()
    now = 1024 * int(status.split("VmData:")[1].split()[0])
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + num_bytes, before[1]))
    try:
        torch.manual_seed(0)
        model = Wide()
        zero.shard_model(model, {"stage": 1, "offload": offload})
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        losses = []
        for _ in range(2):
            loss = model(torch.ones(1, 1024))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@alone(timeout_s=120)
def test_a_model_whose_states_do_not_fit_trains_from_the_disk() -> None:
    few = 100 * 2**20
    with pytest.raises(RuntimeError, match=r"not enough memory|allocate memory"):
        _train_within("none", few)
    on_disk = _train_within({"optimizer": "disk", "path": tempfile.gettempdir(), "slot_bytes": "1MiB"}, few)
    assert on_disk == _train_within("none", 2**31)
