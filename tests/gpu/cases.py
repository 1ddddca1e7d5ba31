"""What has to be seen on an accelerator, as functions of two ranks: `test_gpu` runs them there, and on CPUs to test them.

Each asserts what must hold, on its rank, and returns figures worth reading.
"""

from __future__ import annotations

import contextlib
import gc
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
from hf_zero.comm.beside import watch
from hf_zero.plan.activations import activations
from hf_zero.plan.memory import Setting, predict
from hf_zero.plan.models import config_of
from hf_zero.plan.shapes import meta_model, shapes_of
from tests.gpu import hazards, offload, offload_doors, offload_measured, ordinary, streams
from tests.gpu.training import BLOCKS, LLAMA, STAGES, adamw, batch_of, furthest, train
from tests.models import Stack, make_model, stack_batch


def parity(device: torch.device) -> dict[str, Any]:
    """Losses of every stage are those of one process; in stage 3 what is released is NaN, so that a stale read shows."""
    found = {}
    for stage in STAGES:
        model = make_model(LLAMA).to(device)
        engine = zero.shard_model(model, {"stage": stage, **BLOCKS})
        engine.memory.poison = stage == 3
        found[f"stage {stage}"] = furthest(train(model, device), device)
        found["collectives"] = engine.world.shards.name
    assert all(far < 1e-5 for name, far in found.items() if name != "collectives"), found
    return found


def syncs(device: torch.device) -> dict[str, Any]:
    """Nothing in a step waits for the device: torch raises where it would. (transformers' masks do, so no model of its.)"""
    for stage, compute_dtype in itertools.product(STAGES, ("float32", "bfloat16")):
        model = Stack().to(device)
        zero.shard_model(model, {"stage": stage, "compute_dtype": compute_dtype, "timeout_s": 60})
        optimizer = adamw(model)
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
        model = make_model(LLAMA).to(device)
        engine = zero.shard_model(model, {"stage": 3, **BLOCKS})
        engine.memory.poison = is_late
        for layer in model.model.layers:  # type: ignore[union-attr]
            for module in layer.modules():
                module.register_forward_pre_hook(lag)
                module.register_forward_hook(_when_its_gradient_comes(lag))
        found.append(train(model, device))
    assert torch.equal(*found), found
    return {}


def recomputation(device: torch.device) -> dict[str, Any]:
    """Checkpointed blocks gather again in the backward."""
    model = make_model(LLAMA).to(device)
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    engine = zero.shard_model(model, {"stage": 3, **BLOCKS})
    engine.memory.poison = True
    far = furthest(train(model, device), device)
    assert far < 1e-5, far
    return {"furthest": far}


def bf16(device: torch.device) -> dict[str, Any]:
    """Whole tensors in bfloat16, masters in float32: all stages compute the same, near float32."""
    found = {}
    for stage in STAGES:
        model = make_model(LLAMA).to(device)
        zero.shard_model(model, {"stage": stage, "compute_dtype": "bfloat16", **BLOCKS})
        found[stage] = train(model, device).float()
    assert furthest(found[3], device) < 0.05
    for stage in STAGES:
        assert torch.allclose(found[stage], found[3], atol=1e-2), found
    return {"furthest from float32": furthest(found[3], device)}


def compiled(device: torch.device) -> dict[str, Any]:
    """A compiled block is one graph, made once, between the borders of its unit."""
    model = make_model(LLAMA).to(device)
    zero.shard_model(model, {"stage": 3, **BLOCKS})
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.compile(backend="inductor" if device.type == "cuda" else "aot_eager")
    counters = torch._dynamo.utils.counters
    counters.clear()
    try:
        far = furthest(train(model, device), device)
        graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    finally:
        torch.compiler.reset()
    assert far < 1e-4 and (graphs, breaks) == (1, 2), (far, graphs, breaks)
    return {"furthest": far}


def moved(device: torch.device) -> dict[str, Any]:
    """A model that was made on the CPU trains on the device, and so does one made under `Init`."""
    found = {}
    for stage in (0, 3):
        model = make_model(LLAMA)
        zero.shard_model(model, {"stage": stage, **BLOCKS})
        found[f"shard_model, stage {stage}"] = furthest(train(model, device), device)
        with zero.Init({"stage": stage, **BLOCKS}):
            made = make_model(LLAMA)
        zero.shard_model(made)
        tensors = (*made.named_parameters(), *made.named_buffers())
        elsewhere = {name: each.device for name, each in tensors if each.device != device}
        assert not elsewhere, elsewhere
        found[f"Init, stage {stage}"] = furthest(train(made, device), device)
    assert all(far < 1e-5 for far in found.values()), found
    return found


def resume(device: torch.device, folder: str) -> dict[str, Any]:
    """Training goes on from a checkpoint of fused AdamW with the same bits."""

    def make() -> tuple[Any, Any, Any]:
        plugin = zero.ZeroPlugin(zero.ZeroConfig(stage=3, **BLOCKS))
        accelerator = zero.ZeroAccelerator(cpu=device.type == "cpu", zero_plugin=plugin)
        assert accelerator.device.type == device.type
        model = make_model(LLAMA)
        return accelerator, *accelerator.prepare(model, adamw(model))

    accelerator, model, optimizer = make()
    train(model, device, range(3), optimizer)
    accelerator.save_state(folder)
    expected = train(model, device, range(3, 9), optimizer)
    again, model, optimizer = make()
    again.load_state(folder)
    assert torch.equal(train(model, device, range(3, 9), optimizer), expected)
    return {}


def background(device: torch.device) -> dict[str, Any]:
    """What a thread saves is what was there when it began, and its exchanges do not meet those of training."""
    model = make_model(LLAMA).to(device)
    engine = zero.shard_model(model, {"stage": 3, **BLOCKS})
    optimizer, saves = adamw(model), BackgroundSaves(engine.world)
    train(model, device, range(2), optimizer)
    for step in range(3):
        sources = {name: source_of(param) for name, param in model.named_parameters()}
        expected = {name: torch_compat.local_of(param).cpu().clone() for name, param in model.named_parameters()}
        kept, seen = saves.keep(sources), []

        def save(world: Any, kept: Any = kept, seen: list[Any] = seen) -> None:
            seen += [world.collect(list(range(1000)), "numbers") for _ in range(20)]
            seen.append({name: source.rows.clone() for name, source in kept.items()})

        saves.start(save, lambda: None)
        train(model, device, range(2 + step, 8), optimizer)
        saves.wait()
        assert all(torch.equal(value, expected[name]) for name, value in seen[-1].items())
    return {"bytes kept": saves.kept_bytes}


def late(device: torch.device) -> dict[str, Any]:
    """A rank that does not come to a forward is named: in the log on a device, which cannot raise, else in an error."""
    model = make_model(LLAMA).to(device)
    zero.shard_model(model, {"stage": 3, **BLOCKS, "timeout_s": 3})
    train(model, device, range(2))
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    watch.logger.addHandler(handler)
    try:
        if dist.get_rank() == 1:
            time.sleep(6)
        float(model(**batch_of(2, dist.get_rank(), device)).loss)
    except zero.CollectiveError as error:
        assert device.type == "cpu"
        said.append(str(error))
    finally:
        watch.logger.removeHandler(handler)
    found = [each for each in said if "waited 3 s for rank 1 in gather of" in each]
    assert dist.get_rank() == 1 or len(found) == 1, said
    return {"said": found}


def _meet(device: torch.device) -> None:
    dist.all_reduce(torch.zeros(1, device=device if device.type == "cuda" else "cpu"))  # which torch counts


def _same_alone(model: nn.Module, device: torch.device) -> bool:
    """Whether rank 0 alone reads what all read."""
    alone = [param.full_tensor().cpu() for param in model.parameters()] if dist.get_rank() == 0 else []
    _meet(device)  # what waits in hf_zero has noted its edits already
    together = [param.full_tensor().cpu() for param in model.parameters()]
    return all(map(torch.equal, alone, together))


def alone(device: torch.device) -> dict[str, Any]:
    """Rank 0 swaps an average in, looks at the model, and swaps it out, while the others train on; training is as without."""
    found = {}
    for stage, home in ((1, "none"), (3, "none"), (3, "host")):
        model = make_model(LLAMA).to(device)
        zero.shard_model(model, {"stage": stage, **BLOCKS, "offload": {"optimizer": home, "parameters": home}})
        optimizer, losses = adamw(model), []
        assert _same_alone(model, device), f"stage {stage}, before the first step"
        for first in (0, 2, 4):
            losses.append(train(model, device, range(first, first + 2), optimizer))
            for scale in (0.5, 2.0):
                with torch.no_grad():
                    for param in model.parameters():
                        param.mul_(scale)
                assert _same_alone(model, device), f"stage {stage}, after an edit of all"
            average = [param.detach() * 0.5 for param in model.parameters()]
            if dist.get_rank() == 0:
                plain, batch = make_model(LLAMA).to(device), batch_of(9, 0, device)
                plain.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
                kept = [param.detach().clone() for param in model.parameters()]
                with torch.no_grad():
                    for scale, values in ((1.0, None), (0.5, average), (1.0, kept)):
                        for param, value in zip(model.parameters(), values or [], strict=bool(values)):
                            param.data.copy_(value)
                        for param in plain.parameters():
                            param.mul_(scale)
                        far = float((model(**batch).loss - plain(**batch).loss).abs())
                        assert far < 1e-5, (stage, scale, far)
                        for param in plain.parameters():
                            param.div_(scale)
        _meet(device)
        found[f"stage {stage}, offload {home}"] = furthest(torch.cat(losses), device)
    assert all(far < 1e-5 for far in found.values()), found
    return found


def memory(device: torch.device) -> dict[str, Any]:
    """Peak memory of a step beside the formula's; compared on a device, which counts its own."""
    name, found = "llama-125m", {}
    torch.ones(64, 64, device=device).mm(torch.ones(64, 64, device=device))  # the first takes a workspace, for good
    for stage in STAGES:
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
        gc.collect()
        before = torch.cuda.memory_allocated()
        model = AutoModelForCausalLM.from_config(config).to(device)
        zero.shard_model(model, {"stage": stage})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
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


_HERE = (parity, syncs, delays, recomputation, bf16, compiled, moved, resume, background, late, alone, memory)
CASES: dict[str, Callable[..., dict[str, Any]]] = {
    each.__name__: each
    for each in (
        *_HERE,
        *hazards.OF_TWO,
        *offload.OF_TWO,
        *offload_doors.OF_TWO,
        *offload_measured.OF_TWO,
        *ordinary.OF_TWO,
        *streams.OF_TWO,
        *hazards.OF_FOUR,
    )
}
CASES_OF_FOUR = [each.__name__ for each in hazards.OF_FOUR]
CASES_OF_TWO = [name for name in CASES if name not in CASES_OF_FOUR]
NEED_A_FOLDER = ("resume", "offload_resumed", "offload_doors")


def run(name: str, device_type: str, *folder: str) -> dict[str, Any]:
    """Run a case on a rank of a process group."""
    if device_type == "cpu":
        return CASES[name](torch.device("cpu"), *folder)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return CASES[name](device, *folder)


def _words(found: dict[str, Any]) -> Iterator[str]:
    return itertools.starmap("{}: {}".format, found.items())


if __name__ == "__main__":
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    shown = run(sys.argv[1], kind, *sys.argv[2:])
    print(f"{sys.argv[1]}: right. {'; '.join(_words(shown))}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
