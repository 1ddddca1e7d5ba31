"""What has to be seen on an accelerator, as functions of two ranks: `test_gpu` runs them there, and on CPUs to test them.

Each asserts what must hold, on its rank, and returns figures worth reading.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import hf_zero as zero
from hf_zero import torch_compat
from hf_zero.checkpoint.optimizer_state import source_of
from hf_zero.checkpoint.ranks.background import BackgroundSaves
from hf_zero.comm import watch
from hf_zero.plan.activations import activations
from hf_zero.plan.memory import Setting, predict
from hf_zero.plan.models import config_of
from hf_zero.plan.shapes import meta_model, shapes_of
from tests.models import CASES, Stack, make_model, stack_batch

_LLAMA = CASES["llama"]
_STAGES = (0, 1, 2, 3)
_STEPS = 6
_BLOCKS: dict[str, Any] = {"units": ["LlamaDecoderLayer"], "timeout_s": 60}


def _batch(step: int, rank: int, device: torch.device, micro: int = 0) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in _LLAMA.batch(step, rank, micro).items()}


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def _train(model: nn.Module, device: torch.device, steps: range = range(_STEPS), optimizer: Any = None) -> Tensor:
    """The losses of this rank's batches: [steps], fetched at the end only."""
    optimizer = optimizer or _adamw(model)
    losses = []
    for step in steps:
        loss = model(**_batch(step, dist.get_rank(), device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@functools.cache
def _expected(device: torch.device) -> Tensor:
    """What one process gets for this rank's batches when it trains on those of all ranks: [steps]."""
    model = make_model(_LLAMA).to(device)
    optimizer, found = _adamw(model), []
    for step in range(_STEPS):
        losses = [model(**_batch(step, rank, device)).loss for rank in range(dist.get_world_size())]
        (sum(losses) / len(losses)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(losses[dist.get_rank()].detach())
    return torch.stack(found)


def _furthest(losses: Tensor, device: torch.device) -> float:
    return float((losses - _expected(device)).abs().max())


def parity(device: torch.device) -> dict[str, Any]:
    """Losses of every stage are those of one process; in stage 3 what is released is NaN, so that a stale read shows."""
    found = {}
    for stage in _STAGES:
        model = make_model(_LLAMA).to(device)
        engine = zero.shard_model(model, {"stage": stage, **_BLOCKS})
        engine.memory.poison = stage == 3
        found[f"stage {stage}"] = _furthest(_train(model, device), device)
        found["collectives"] = engine.world.shards.name
    assert all(far < 1e-5 for name, far in found.items() if name != "collectives"), found
    return found


def syncs(device: torch.device) -> dict[str, Any]:
    """Nothing in a step waits for the device: torch raises where it would. (transformers' masks do, so no model of its.)"""
    for stage, compute_dtype in itertools.product(_STAGES, ("float32", "bfloat16")):
        model = Stack().to(device)
        zero.shard_model(model, {"stage": stage, "compute_dtype": compute_dtype, "timeout_s": 60})
        optimizer = _adamw(model)
        batches = [stack_batch(micro, dist.get_rank()) for micro in range(3)]
        batches = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]
        try:
            for step in range(4):
                if device.type != "cpu" and step == 2:
                    torch.get_device_module(device).set_sync_debug_mode("error")
                for micro, batch in enumerate(batches):
                    with model.no_sync() if micro == 0 else contextlib.nullcontext():  # type: ignore[operator]
                        model(**batch).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        finally:
            if device.type != "cpu":
                torch.get_device_module(device).set_sync_debug_mode("default")
    return {}


def _when_its_gradient_comes(act: Callable[..., None]) -> Callable[..., None]:
    """A forward hook that lets `act` run when the gradient of the output has come."""

    def watch(module: nn.Module, args: object, output: Any) -> None:
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(act)

    return watch


def delays(device: torch.device) -> dict[str, Any]:
    """Ranks and streams that lag behind at random change no bit."""

    draw, found = random.Random(dist.get_rank()), []

    def lag(*_: object) -> None:
        if is_late:
            time.sleep(draw.random() * 3e-3 * (dist.get_rank() + draw.random()))
            if device.type == "cuda":
                torch.cuda._sleep(draw.randrange(3_000_000))

    for is_late in (False, True):
        model = make_model(_LLAMA).to(device)
        engine = zero.shard_model(model, {"stage": 3, **_BLOCKS})
        engine.memory.poison = is_late
        for layer in model.model.layers:  # type: ignore[union-attr]
            for module in layer.modules():
                module.register_forward_pre_hook(lag)
                module.register_forward_hook(_when_its_gradient_comes(lag))
        found.append(_train(model, device))
    assert torch.equal(*found), found
    return {}


def recomputation(device: torch.device) -> dict[str, Any]:
    """Checkpointed blocks gather again in the backward."""
    model = make_model(_LLAMA).to(device)
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    engine = zero.shard_model(model, {"stage": 3, **_BLOCKS})
    engine.memory.poison = True
    far = _furthest(_train(model, device), device)
    assert far < 1e-5, far
    return {"furthest": far}


def bf16(device: torch.device) -> dict[str, Any]:
    """Whole tensors in bfloat16, masters in float32: all stages compute the same, near float32."""
    found = {}
    for stage in _STAGES:
        model = make_model(_LLAMA).to(device)
        zero.shard_model(model, {"stage": stage, "compute_dtype": "bfloat16", **_BLOCKS})
        found[stage] = _train(model, device).float()
    assert _furthest(found[3], device) < 0.05
    for stage in _STAGES:
        assert torch.allclose(found[stage], found[3], atol=1e-2), found
    return {"furthest from float32": _furthest(found[3], device)}


def compiled(device: torch.device) -> dict[str, Any]:
    """A compiled block is one graph, made once, between the borders of its unit."""
    model = make_model(_LLAMA).to(device)
    zero.shard_model(model, {"stage": 3, **_BLOCKS})
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.compile(backend="inductor" if device.type == "cuda" else "aot_eager")
    counters = torch._dynamo.utils.counters
    counters.clear()
    try:
        far = _furthest(_train(model, device), device)
        graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    finally:
        torch.compiler.reset()
    assert far < 1e-4 and (graphs, breaks) == (1, 2), (far, graphs, breaks)
    return {"furthest": far}


def moved(device: torch.device) -> dict[str, Any]:
    """A model that was made on the CPU trains on the device, and so does one made under `Init`."""
    found = {}
    for stage in (0, 3):
        model = make_model(_LLAMA)
        zero.shard_model(model, {"stage": stage, **_BLOCKS})
        found[f"shard_model, stage {stage}"] = _furthest(_train(model, device), device)
        with zero.Init({"stage": stage, **_BLOCKS}):
            made = make_model(_LLAMA)
        zero.shard_model(made)
        assert {each.device for each in (*made.parameters(), *made.buffers())} == {device}
        found[f"Init, stage {stage}"] = _furthest(_train(made, device), device)
    assert all(far < 1e-5 for far in found.values()), found
    return found


def resume(device: torch.device, folder: str) -> dict[str, Any]:
    """Training goes on from a checkpoint of fused AdamW with the same bits."""

    def make() -> tuple[Any, Any, Any]:
        plugin = zero.ZeroPlugin(zero.ZeroConfig(stage=3, **_BLOCKS))
        accelerator = zero.ZeroAccelerator(cpu=device.type == "cpu", zero_plugin=plugin)
        assert accelerator.device.type == device.type
        model = make_model(_LLAMA)
        return accelerator, *accelerator.prepare(model, _adamw(model))

    accelerator, model, optimizer = make()
    _train(model, device, range(3), optimizer)
    accelerator.save_state(folder)
    expected = _train(model, device, range(3, 9), optimizer)
    again, model, optimizer = make()
    again.load_state(folder)
    assert torch.equal(_train(model, device, range(3, 9), optimizer), expected)
    return {}


def background(device: torch.device) -> dict[str, Any]:
    """What a thread saves is what was there when it began, and its exchanges do not meet those of training."""
    model = make_model(_LLAMA).to(device)
    engine = zero.shard_model(model, {"stage": 3, **_BLOCKS})
    optimizer, saves = _adamw(model), BackgroundSaves(engine.world)
    _train(model, device, range(2), optimizer)
    for step in range(3):
        sources = {name: source_of(param) for name, param in model.named_parameters()}
        expected = {name: torch_compat.local_of(param).cpu().clone() for name, param in model.named_parameters()}
        kept, seen = saves.keep(sources), []

        def save(world: Any, kept: Any = kept, seen: list[Any] = seen) -> None:
            seen += [world.collect(list(range(1000)), "numbers") for _ in range(20)]
            seen.append({name: source.rows.clone() for name, source in kept.items()})

        saves.start(save, lambda: None)
        _train(model, device, range(2 + step, 8), optimizer)
        saves.wait()
        assert all(torch.equal(value, expected[name]) for name, value in seen[-1].items())
    return {"bytes kept": saves.kept_bytes}


def late(device: torch.device) -> dict[str, Any]:
    """A rank that does not come to an evaluation is named: in the log on a device, which cannot raise, else in an error."""
    model = make_model(_LLAMA).to(device)
    zero.shard_model(model, {"stage": 3, **_BLOCKS, "timeout_s": 3})
    _train(model, device, range(2))
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    watch.logger.addHandler(handler)
    try:
        if dist.get_rank() == 1:
            time.sleep(6)
        with torch.no_grad():
            float(model(**_batch(2, dist.get_rank(), device)).loss)
    except zero.CollectiveError as error:
        assert device.type == "cpu"
        said.append(str(error))
    finally:
        watch.logger.removeHandler(handler)
    assert dist.get_rank() == 1 or "waited 3 s for rank 1 in gather of" in said[0], said
    return {"said": said[:1]}


def memory(device: torch.device) -> dict[str, Any]:
    """Peak memory of a step beside the formula's; compared on a device, which counts its own."""
    name, found = "llama-125m", {}
    for stage in _STAGES:
        config = config_of(name)
        config.use_cache = False
        template = meta_model(name)
        template.config.use_cache = False  # type: ignore[union-attr]
        tokens = torch.zeros(2, 128, dtype=torch.long, device="meta")
        kept = activations(template, {"input_ids": tokens, "labels": tokens})
        setting = Setting(zero.ZeroConfig(stage=stage, collectives="native"), dist.get_world_size())
        predicted = predict(shapes_of(template), setting, kept).peak
        found[f"stage {stage}"] = f"{predicted / 2**20:.0f} MiB predicted"
        if device.type != "cuda":
            continue
        before = torch.cuda.memory_allocated()
        model = AutoModelForCausalLM.from_config(config).to(device)
        zero.shard_model(model, {"stage": stage})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            ids = torch.randint(0, 1000, (2, 128), device=device)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        measured = torch.cuda.max_memory_allocated() - before
        found[f"stage {stage}"] += f", {measured / 2**20:.0f} MiB measured"
        assert abs(predicted / measured - 1) < 0.15, found
        del model, optimizer
    return found


CASES_OF_TWO: dict[str, Callable[..., dict[str, Any]]] = {
    each.__name__: each
    for each in (parity, syncs, delays, recomputation, bf16, compiled, moved, resume, background, late, memory)
}
NEED_A_FOLDER = ("resume",)


def run(name: str, device_type: str, *folder: str) -> dict[str, Any]:
    """Run a case on a rank of a process group."""
    if device_type == "cpu":
        return CASES_OF_TWO[name](torch.device("cpu"), *folder)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return CASES_OF_TWO[name](device, *folder)


def _words(found: dict[str, Any]) -> Iterator[str]:
    return itertools.starmap("{}: {}".format, found.items())


if __name__ == "__main__":
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    shown = run(sys.argv[1], kind, *sys.argv[2:])
    print(f"{sys.argv[1]}: right. {'; '.join(_words(shown))}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
