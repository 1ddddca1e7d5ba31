"""What goes wrong on an accelerator alone: its threads, its memory, its transport; as cases of two ranks, and of four.

On a GPU autograd runs a backward on a thread of its own, and drops what it was told to call there, too, some time later. NCCL
takes one dtype in a coalesced all-reduce. And what is whole on a device is whole on every rank of a host.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

import hf_zero as zero
from hf_zero.comm.groups import torch_groups
from hf_zero.optim.choice import stepping_of, worlds_of
from tests.gpu.training import BLOCKS, LLAMA, STAGES, STEPS, adamw, batch_of, furthest, train
from tests.models import Case, Stack, make_model, stack_batch
from tests.tensor_axis import CONFIGS as configs_of_the_tensor_axis


def closure(device: torch.device) -> dict[str, Any]:
    """An optimizer that runs the model itself: the backward is on another thread than the step."""
    found = {}
    for stage in STAGES:
        model = make_model(LLAMA).to(device)
        zero.shard_model(model, {"stage": stage, **BLOCKS})
        optimizer, losses = adamw(model), []
        for step in range(STEPS):

            def evaluate(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = model(**batch_of(step, dist.get_rank(), device)).loss
                loss.backward()
                losses.append(loss.detach())
                return loss

            optimizer.step(evaluate)
        found[f"stage {stage}"] = furthest(torch.stack(losses), device)
    assert all(far < 1e-5 for far in found.values()), found
    return found


class _OutOfMemory(RuntimeError):
    pass


def _raise(gradient: Tensor) -> None:
    raise _OutOfMemory


def raises(device: torch.device) -> dict[str, Any]:
    """A backward that breaks off on all ranks, and is caught, leaves the model at rest at once."""
    found = {}
    for stage in STAGES:
        model = make_model(LLAMA).to(device)
        engine = zero.shard_model(model, {"stage": stage, **BLOCKS})
        at_rest = [id(param) for param in model.parameters()]
        middle = model.model.layers[1]  # type: ignore[union-attr, index]
        for _ in range(5):
            hook = middle.register_forward_hook(lambda module, args, output: output.register_hook(_raise) and None)
            try:
                model(**batch_of(0, dist.get_rank(), device)).loss.backward()
            except _OutOfMemory:
                assert [id(param) for param in model.parameters()] == at_rest
                assert all(param.is_leaf for param in adamw(model).param_groups[0]["params"])
                assert engine.backward.session is None
            else:
                raise AssertionError("nothing was raised")
            finally:
                hook.remove()
        for param in model.parameters():
            param.grad = None
        found[f"stage {stage}"] = furthest(train(model, device), device)
    assert all(far < 1e-5 for far in found.values()), found
    return found


def mixed(device: torch.device) -> dict[str, Any]:
    """Gradients of two dtypes in what is all-reduced: norms that are kept in float32, reduced as they are made."""
    model = make_model(LLAMA).to(device)
    kept = {"compute_dtype": "bfloat16", "keep_fp32": ["LlamaRMSNorm"], "reduce_dtype": "auto", "reduce_scatter": False}
    zero.shard_model(model, {"stage": 2, **kept, **BLOCKS})
    far = furthest(train(model, device).float(), device)
    assert far < 0.05, far
    return {"furthest from float32": far}


def half(device: torch.device) -> dict[str, Any]:
    """Losses scaled for float16: the scale changes on the device, and the process does not wait for it."""
    if device.type == "cpu":
        return {}  # there are tests of what it becomes
    model = Stack().to(device)
    zero.shard_model(model, {"stage": 2, "compute_dtype": "float16", "timeout_s": 60})
    optimizer, scaler = adamw(model), zero.LossScaler(zero.LossScale(2.0**14, window=2, minimum=2.0**14), device.type)
    batch = {name: each.to(device) for name, each in stack_batch(0, dist.get_rank()).items()}

    def step(factor: float = 1.0) -> None:
        scaler.scale(model(**batch) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    step()
    torch.get_device_module(device).set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.get_device_module(device).set_sync_debug_mode("default")
    assert scaler.get_scale() == 2.0**15
    step(float("inf"))
    assert scaler.get_scale() == 2.0**14
    step(float("inf"))
    try:
        step()
    except zero.UsageError:
        return {}
    raise AssertionError("an overflow at the smallest scale was not told")


def connections(device: torch.device) -> dict[str, Any]:
    """Groups for what is on a device have no backend for the host beside it, which would connect all ranks once more."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    shards = zero.shard_model(model, {"stage": 3, "timeout_s": 60}).world.shards
    for group in (shards.group, shards.gather_group):
        assert torch_groups.exchanges_on(group, device)
        assert device.type == "cpu" or not torch_groups.exchanges_on(group, torch.device("cpu"))
    return {}


def whole_model(device: torch.device) -> dict[str, Any]:
    """A model that was made on the CPU is never whole on the device: one parameter of it, and rows, in stages 1 to 3."""
    found = {}
    for through in ("shard_model", "prepare"):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(16)))
        before = 0 if device.type == "cpu" else torch.get_device_module(device).memory_allocated(device)
        if device.type != "cpu":
            torch.get_device_module(device).reset_peak_memory_stats(device)
        config = zero.ZeroConfig(stage=3, units=["Linear"], timeout_s=60)
        if through == "shard_model":
            zero.shard_model(model, config)
        else:
            accelerator = zero.ZeroAccelerator(cpu=device.type == "cpu", zero_plugin=zero.ZeroPlugin(config))
            model = accelerator.prepare(model)
        assert {param.device for param in model.parameters()} == {device}
        if device.type == "cpu":
            continue
        peak = torch.get_device_module(device).max_memory_allocated(device) - before
        num_bytes = sum(param.numel() * 4 for param in model.parameters())
        found[through] = peak / num_bytes
        del model
    limit = 1 / dist.get_world_size() + 0.2
    assert all(share < limit for share in found.values()), found
    return found


def bound(device: torch.device) -> dict[str, Any]:
    """Where nobody has set a device, each rank takes the one of its group, or of its number on the host."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(0)
    try:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        zero.shard_model(model, {"stage": 3, "timeout_s": 60})
        assert {param.device for param in model.parameters()} == {device}
    finally:
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index)
    return {}


class _Unknown(torch.optim.Optimizer):
    """Of a class that has to be tried: it adds noise, of the device where its parameters are."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad + 0 * torch.rand_like(param.grad))


def random_numbers(device: torch.device) -> dict[str, Any]:
    """An optimizer that is tried first leaves the random numbers of the device where they are."""
    found = []
    for kind in (torch.optim.SGD, _Unknown):
        model = make_model(LLAMA).to(device)
        zero.shard_model(model, {"stage": 1, "optimizer_on": "auto" if kind is _Unknown else "rows", **BLOCKS})
        model(**batch_of(0, dist.get_rank(), device)).loss.backward()
        optimizer = kind(model.parameters())
        torch.manual_seed(5 + dist.get_rank())
        if kind is _Unknown:
            stepping_of(optimizer, worlds_of(optimizer))  # chosen, and not run: it draws itself
        found.append(torch.stack([torch.rand(3, device=device).cpu(), torch.rand(3, device="cpu")]))
    assert torch.equal(*found), found
    return {}


def _parity_of_cells(device: torch.device, case: Case = LLAMA, **config: Any) -> float:
    """How far the losses of a model are from those of one process that sees the batch of every cell of the tensor axis."""
    model = make_model(case)
    zero.shard_model(model, {**BLOCKS, **config})
    size = config.get("tp_size", 1)
    cell, cells = dist.get_rank() // size, dist.get_world_size() // size
    return furthest(train(model, device, cell=cell, case=case), device, cell, cells, case)


def replicas(device: torch.device) -> dict[str, Any]:
    """Two replicas of two shards each: what is not cut, and rows, are averaged between them."""
    found = {stage: _parity_of_cells(device, stage=stage, replicate=2) for stage in (2, 3)}
    assert all(far < 1e-5 for far in found.values()), found
    return {f"stage {stage}": far for stage, far in found.items()}


def _two_heads() -> nn.Module:
    """A Llama whose heads of keys and values two ranks can share."""
    made: nn.Module = AutoModelForCausalLM.from_config(configs_of_the_tensor_axis["llama"]())
    return made


TWO_HEADS = dataclasses.replace(LLAMA, name="llama with two heads", build=_two_heads)


def tensor_axis(device: torch.device) -> dict[str, Any]:
    """Two shards of layers that two ranks share each."""
    found = {stage: _parity_of_cells(device, TWO_HEADS, stage=stage, tp_size=2) for stage in (2, 3)}
    assert all(far < 1e-4 for far in found.values()), found
    return {f"stage {stage}": far for stage, far in found.items()}


def some_ranks(device: torch.device) -> dict[str, Any]:
    """Two ranks of a larger program train by themselves: no other rank has to come when their groups are made."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if dist.get_rank() > 1:
        return {}
    model = make_model(LLAMA)
    zero.shard_model(model, {"stage": 3, **BLOCKS}, mesh=DeviceMesh.from_group(groups[0], device.type))
    far = furthest(train(model, device), device, num_batches=2)
    assert far < 1e-5, far
    return {"furthest": far}


OF_TWO = (closure, raises, mixed, half, connections, whole_model, bound, random_numbers)
OF_FOUR = (replicas, tensor_axis, some_ranks)
