"""Parts that are right or wrong: what every stage computes, what a resumed run goes on with, and a rank that is lost."""

from __future__ import annotations

import logging
import os
import signal
import textwrap
import time
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

import hf_zero
from hf_zero.bench.gpu.page import Section
from hf_zero.bench.gpu.training import STEPS, adamw, batch, engine_of, expected, partitioned, small_model, train, worst
from hf_zero.bench.processes import report
from hf_zero.errors import ZeroError

_STAGES = (0, 1, 2, 3)
# Of losses near 5.5: additions in another order, and eight bits of a number.
_TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1}
_LOST_S, _TIMEOUT_S, _MANY = 30.0, 10.0, 1000


def parity(device: torch.device, given: dict[str, Any]) -> Section:
    """Losses of every stage beside those of one process; in stage 3 what is released is NaN, so that a stale read shows."""
    plain, rows, is_right = expected(device), [("stage", *_TOLERANCES, "exchanges")], True
    for stage in _STAGES:
        cells, exchanges = [], ""
        for dtype, tolerance in _TOLERANCES.items():
            model = partitioned(stage, compute_dtype=dtype)
            engine = engine_of(model)
            engine.memory.poison, exchanges = stage == 3, engine.world.shards.name
            far = worst(float((train(model, device) - plain).abs().nan_to_num(float("inf")).max()))
            is_right &= far < tolerance
            cells.append(f"{far:.1e} {'right' if far < tolerance else 'WRONG'}")
        rows.append((str(stage), *cells, exchanges))
    said = f"furthest loss from one process, {STEPS} steps, {dist.get_world_size()} ranks, released memory poisoned"
    to_do = [
        "Run it once more with CUDA_LAUNCH_BLOCKING=1, and with NCCL_P2P_DISABLE=1: right with one of them alone means a "
        "missing wait, or a link that loses bytes (check `dmesg` for Xid errors).",
        "Where float32 alone is far off: is TF32 on (NVIDIA_TF32_OVERRIDE, torch.set_float32_matmul_precision)?",
    ]
    return Section("right" if is_right else "WRONG", said, rows, () if is_right else to_do)


def resume(device: torch.device, given: dict[str, Any]) -> Section:
    """Training goes on from a checkpoint with the same bits."""
    found = []
    for is_resumed in (False, True):
        plugin = hf_zero.ZeroPlugin(hf_zero.ZeroConfig(stage=3, timeout_s=60))
        accelerator = hf_zero.ZeroAccelerator(cpu=device.type == "cpu", zero_plugin=plugin)
        model = small_model()
        model, optimizer = accelerator.prepare(model, adamw(model))
        if is_resumed:
            accelerator.load_state(given["folder"] + "/state")
        else:
            train(model, device, range(3), optimizer)
            accelerator.save_state(given["folder"] + "/state")
        found.append(train(model, device, range(3, 6), optimizer))
    far = worst(float((found[0] - found[1]).abs().max()))
    said = f"losses after a checkpoint of stage 3 with fused AdamW, kept and loaded: {far:.1e} apart"
    to_do = [
        "Not the same bits: kernels that add up in changing order also do so without hf_zero; compare two runs with "
        "torch.use_deterministic_algorithms(True)."
    ]
    return Section("right" if far == 0 else "look", said, to_do=() if far == 0 else to_do)


def killed(device: torch.device, given: dict[str, Any]) -> Section:
    """What the others say, and how soon, when the last rank is killed in a step: an error, or a log where a device is stuck."""
    model = partitioned(3, timeout_s=_TIMEOUT_S)
    optimizer = adamw(model)
    train(model, device, range(2), optimizer)
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    handler, start = logging.Handler(logging.ERROR), time.monotonic()

    def tell(record: logging.LogRecord) -> None:  # in another thread, while this one waits inside torch
        report(asdict(_about_a_lost_rank(record.getMessage(), time.monotonic() - start)))
        os._exit(0)

    handler.emit = tell  # type: ignore[method-assign]
    logging.getLogger("hf_zero").addHandler(handler)
    try:
        for step in range(2, _MANY):
            loss = model(**batch(step, dist.get_rank(), device)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except ZeroError as error:
        return _about_a_lost_rank(str(error), time.monotonic() - start)
    return Section("WRONG", f"{_MANY} steps were trained without the rank that was killed")


def _about_a_lost_rank(text: str, seconds: float) -> Section:
    is_named = f"for rank {dist.get_world_size() - 1}" in text or f"lost rank {dist.get_world_size() - 1}" in text
    is_right = is_named and seconds < _LOST_S
    words = textwrap.shorten(text, 160, placeholder=" ...")
    said = f"rank 0 told after {seconds:.1f} s, {'and named it' if is_named else 'but did not name it'}: {words}"
    to_do = [
        "Where it takes long, processes wait inside NCCL: set timeout_s below the time that a lost rank may cost, and let the "
        "launcher restart (`torchrun --max-restarts`).",
        "Where it is not named, look into each rank's log for the first error.",
    ]
    return Section("right" if is_right else "look", said, to_do=() if is_right else to_do)
