"""Parts about a device's memory: what communicators take, the peak beside the plan's, and what offload to the host leaves."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
import torch.distributed as dist

import hf_zero
from hf_zero.bench import devices
from hf_zero.bench.gpu.page import Section, mib
from hf_zero.bench.gpu.training import partitioned, step, train, under, worst
from hf_zero.errors import ZeroError
from hf_zero.plan.activations import activations
from hf_zero.plan.memory import Setting, predict
from hf_zero.plan.shapes import meta_model, shapes_of

_MUCH = 2**30  # that communicators take
_NEAR = 0.15  # the peak to the plan's
_LOOSE = 1.25  # what the allocator holds, over the peak
_STEPS, _WARM_UP = 5, 2
_FAR = 0.1  # of losses near 10 in bfloat16, after that many steps


def communicators(device: torch.device, given: dict[str, Any]) -> Section:
    """What NCCL takes beside torch's allocator, for the program's group and for those of a model."""
    devices.synchronize(device)
    torch.ones(1, device=device)
    free = [devices.memory_of(device)[0]]
    dist.all_reduce(torch.ones(1, device=device))
    devices.synchronize(device)
    free.append(devices.memory_of(device)[0])
    held = devices.reserved_on(device)
    model = partitioned(3)
    train(model, device)
    devices.synchronize(device)
    free.append(devices.memory_of(device)[0] + devices.reserved_on(device) - held)
    own = [before - after for before, after in itertools.pairwise(free)]
    program, of_model = (max(0.0, worst(float(each))) for each in own)
    rows = [("of", "takes"), ("the program's group", mib(program)), ("a model's two, in stage 3", mib(of_model))]
    if not program + of_model:
        return Section("not here", "the device does not tell what is free")
    is_much = of_model > _MUCH
    to_do = [
        "NCCL_MAX_CTAS=8 or NCCL_BUFFSIZE=2097152 make each of them smaller, and large exchanges slower; measure.",
        "A model that is dropped gives its communicators back when the next one is partitioned.",
    ]
    said = f"{mib(program + of_model)} on the rank that has least left, beside what torch counts"
    return Section("look" if is_much else "right", said, rows, to_do if is_much else ())


def peak(device: torch.device, given: dict[str, Any]) -> Section:
    """The peak of a step beside what `hf-zero plan` says, in every stage, and what the allocator holds beside it."""
    rows: list[tuple[str, ...]] = [("stage", "plan", "peak", "over plan", "held by the allocator")]
    is_near = is_tight = True
    for stage in (0, 1, 2, 3):
        predicted, before = _planned(stage, given), devices.reset_peak(device)
        trained = under("zero3:keep=none" if stage == 3 else f"zero{stage}", device, given)
        for _ in range(_STEPS):
            step(trained, device, given)
        measured = worst(float(devices.peak_of(device) - before))
        held = worst(float(devices.reserved_on(device)))
        if not measured:
            return Section("not here", "the device does not count what is allocated")
        is_near &= abs(predicted / measured - 1) < _NEAR
        is_tight &= held < _LOOSE * (measured + before)
        rows.append((str(stage), mib(predicted), mib(measured), f"{measured / predicted:.2f}", mib(held)))
        del trained
        devices.give_back(device)
    to_do = (
        [] if is_near else ["More than 15% off: kernels with workspaces of their own; send this page, with the model."]
    )
    if not is_tight:
        to_do.append(
            "The allocator holds a quarter more than it needs: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
        )
    said = f"{given['model']}, bfloat16, {given['batch_size']} x {given['seq_len']} tokens a rank, AdamW"
    return Section("look" if to_do else "right", said, rows, to_do)


def offload(device: torch.device, given: dict[str, Any]) -> Section:
    """Losses, times and peaks with optimizer states, and parameters, in the host's memory."""
    ways = {
        "nothing": "none",
        "optimizer": {"optimizer": "host"},
        "optimizer and parameters": {"optimizer": "host", "parameters": "host"},
    }
    rows, plain, refused, is_right = [("on the host", "ms a step", "peak", "losses")], None, "", True
    for name, how in ways.items():
        devices.give_back(device)
        before = devices.reset_peak(device)
        try:
            trained = under("zero3", device, given, offload=how)
            losses = [step(trained, device, given, number) for number in range(_WARM_UP)]
            devices.synchronize(device)
            start = time.perf_counter()
            losses += [step(trained, device, given, number) for number in range(_WARM_UP, _STEPS)]
            devices.synchronize(device)
        except ZeroError as error:  # of the configuration, so on all ranks
            refused = " ".join(str(error).split())
            rows.append((name, "-", "-", "not supported here"))
            continue
        seconds = worst((time.perf_counter() - start) / (_STEPS - _WARM_UP))
        found = torch.stack(losses).float().cpu()
        plain = found if plain is None else plain
        far = worst(float((found - plain).abs().nan_to_num(float("inf")).max()))
        is_right &= far < _FAR
        taken = worst(float(devices.peak_of(device) - before))
        rows.append((name, f"{seconds * 1e3:.1f}", mib(taken), f"{far:.1e} apart" if far else "the same bits"))
        del trained, losses
    if refused:
        return Section("not here" if is_right else "WRONG", f"not supported here: {refused}", rows)
    said = f"{given['model']}, stage 3, bfloat16, against nothing on the host; AdamW rounds otherwise there"
    return Section("right" if is_right else "WRONG", said, rows)


def _planned(stage: int, given: dict[str, Any]) -> int:
    template = meta_model(given["model"]).to(torch.bfloat16)
    template.config.use_cache = False  # type: ignore[union-attr]
    tokens = torch.zeros(given["batch_size"], given["seq_len"], dtype=torch.long, device="meta")
    kept = activations(template, {"input_ids": tokens, "labels": tokens})
    how: dict[str, Any] = {"stage": stage, "compute_dtype": "bfloat16", "collectives": "native"}
    config = hf_zero.ZeroConfig(**how, reshard_after_forward=True if stage == 3 else "auto")
    return predict(shapes_of(meta_model(given["model"])), Setting(config, dist.get_world_size()), kept).peak
