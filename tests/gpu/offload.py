"""Offload to host memory, as cases of two ranks and of one: the same bits as without, whatever runs late."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hf_zero as zero
from hf_zero.engine.parameters import on_host
from hf_zero.engine.parameters.host_rows import HostRows
from hf_zero.host import cores as host_cores
from hf_zero.host import memory as host_memory
from hf_zero.optim.offloaded import to_host
from tests.gpu.training import BLOCKS, LLAMA, STEPS, adamw, alike, batch_of, train
from tests.models import make_model

HOST: dict[str, Any] = {"optimizer": "host"}
ALL_ON_HOST: dict[str, Any] = {"optimizer": "host", "parameters": "host"}


def places(stage: int) -> list[dict[str, Any]]:
    """What can be offloaded in a stage."""
    return [HOST, ALL_ON_HOST] if stage == 3 else [HOST]


def trained(device: torch.device, config: dict[str, Any], micro_batches: int = 1, clips: bool = False) -> Tensor:
    """The losses of some steps."""
    model = make_model(LLAMA).to(device)
    zero.shard_model(model, {**BLOCKS, **config})
    optimizer, losses = adamw(model), []
    if ratio := config.get("offload", {"ratio": 0}).get("ratio", 1):
        on_host = sum(param.numel() for param in model.parameters() if param.device.type == "cpu")
        share = on_host / sum(param.numel() for param in model.parameters())
        assert share == 1 or (device.type != "cpu" and ratio <= share < 0.9), share
    for step in range(STEPS):
        for micro in range(micro_batches):
            loss = model(**batch_of(step * micro_batches + micro, dist.get_rank(), device)).loss
            loss.backward()
            losses.append(loss.detach())
        if clips:
            losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).to(device))
        optimizer.step()
        optimizer.zero_grad()
    assert all(value.device == param.device for param, state in optimizer.state.items() for value in state.values())
    return torch.stack(losses)


def offload(device: torch.device) -> dict[str, Any]:
    """Losses have the bits of a run that offloads nothing."""
    for stage, dtype in itertools.product((1, 2, 3), ("float32", "bfloat16")):
        config = {"stage": stage, "compute_dtype": dtype}
        expected = trained(device, config).cpu()
        assert expected.isfinite().all()
        for place in places(stage):
            found = trained(device, {**config, "offload": place}).cpu()
            assert alike(found, expected, device), (config, place, found, expected)
    return {}


def offload_is_refused(device: torch.device) -> dict[str, Any]:
    """What cannot be offloaded is one error on all ranks, before the first step."""
    if device.type == "cpu":
        return {}

    def cut(**config: Any) -> nn.Module:
        model = make_model(LLAMA).to(device)
        zero.shard_model(model, {"stage": 2, **BLOCKS, "offload": HOST, **config})
        return model

    with patch.object(on_host, "available_bytes", lambda: 100), pytest.raises(zero.OffloadError, match="100 are avail"):
        cut()
    left = [10**12, 100][min(dist.get_rank(), dist.get_world_size() - 1)] if dist.get_world_size() > 1 else 100
    with (
        patch.object(on_host, "available_bytes", lambda: left),
        pytest.raises(zero.OffloadError, match="100 are avail"),
    ):
        cut()
    with patch.object(host_memory.torch, "empty", _without_locked_pages(torch.empty)):
        with pytest.raises(zero.OffloadError, match="ulimit -l"):
            cut()
        cut(offload={**HOST, "pin": False})
    with pytest.raises(zero.ConfigError, match="a disk works on CPU ranks only"):
        cut(offload={"optimizer": "disk", "path": "/tmp"})
    with patch.object(torch, "Stream", _no_streams), pytest.raises(zero.ConfigError, match="has no streams"):
        cut()
    _refused_states(device, cut)
    if dist.get_world_size() > 1:
        model = cut()
        model(**batch_of(0, dist.get_rank(), device)).loss.backward()
        with pytest.raises(zero.UsageError, match="do not travel from host memory"):
            torch.optim.Adafactor(model.parameters()).step()
    return {}


def _refused_states(device: torch.device, cut: Any) -> None:
    """There is room for parameters and gradients, but on one rank's word not for the states of Adam: told before a step."""
    model, is_last = make_model(LLAMA), dist.get_rank() == dist.get_world_size() - 1
    left = 7 * sum(param.numel() for param in model.parameters()) if is_last else 10**12

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(**batch_of(0, dist.get_rank(), device)).loss.backward()
        optimizer.step()

    config: Any = {"compute_dtype": "bfloat16", **BLOCKS, "offload": HOST}
    with patch.object(on_host, "available_bytes", lambda: left):
        model = cut(**config)
        step(model, torch.optim.SGD(model.parameters(), 0.1))  # has none
        step(model, torch.optim.Adagrad(model.parameters()))  # has made them with itself
        optimizer, before = adamw(model), [_local(param).clone() for param in model.parameters()]
        with pytest.raises(zero.OffloadError, match="for states of AdamW"):
            step(model, optimizer)
        assert not optimizer.state and all(map(torch.equal, map(_local, model.parameters()), before))
        model, plugin = make_model(LLAMA), zero.ZeroPlugin(zero.ZeroConfig(stage=3, **config))
        with pytest.raises(zero.OffloadError, match="for states of AdamW"):
            zero.ZeroAccelerator(zero_plugin=plugin).prepare(model, adamw(model))
    model = cut(**config)
    step(model, adamw(model))


def _local(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param.detach()


def _without_locked_pages(make: Any) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("pin_memory"):
            raise RuntimeError("cannot lock")
        return make(*args, **kwargs)

    return refuse


def _no_streams(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("no streams here")


def offload_in_parts(device: torch.device) -> dict[str, Any]:
    """So have those of several micro-batches, of clipped gradients, and of a part that stays on the device."""
    for stage in (1, 2, 3):
        config = {"stage": stage, "compute_dtype": "bfloat16"}
        expected = trained(device, {**config, "stage": max(stage, 2)}, 3, clips=True).cpu()
        for place in (*places(stage), {**HOST, "pin": False}, {**HOST, "ratio": 0.4}):
            found = trained(device, {**config, "offload": place}, 3, clips=True).cpu()
            # Torch adds the norms of one device up before those of another.
            is_near = "ratio" in place and torch.allclose(found, expected, rtol=0, atol=1e-5)
            assert is_near or alike(found, expected, device), (config, place, found, expected)
    return {}


def offload_resumed(device: torch.device, folder: str) -> dict[str, Any]:
    """A checkpoint of a run that offloads goes on without, and the other way round, with the same bits."""

    def make(where: Any) -> tuple[Any, Any, Any]:
        plugin = zero.ZeroPlugin(zero.ZeroConfig(stage=3, compute_dtype="bfloat16", offload=where, **BLOCKS))
        accelerator = zero.ZeroAccelerator(cpu=device.type == "cpu", zero_plugin=plugin)
        model = make_model(LLAMA)
        return accelerator, *accelerator.prepare(model, adamw(model))

    for number, (before, after) in enumerate(itertools.permutations(("none", HOST, ALL_ON_HOST), 2)):
        accelerator, model, optimizer = make(before)
        train(model, device, range(2), optimizer)
        accelerator.save_state(f"{folder}{number}")
        expected = train(model, device, range(2, 4), optimizer)
        again, model, optimizer = make(after)
        again.load_state(f"{folder}{number}")
        assert alike(train(model, device, range(2, 4), optimizer), expected, device), (before, after)
        if device.type != "cpu" and after != "none":
            with (
                patch.object(on_host, "available_bytes", lambda: 100),
                pytest.raises(zero.ZeroError, match="for states of AdamW"),
            ):
                again.load_state(f"{folder}{number}")
    return {}


def offload_scaled(device: torch.device) -> dict[str, Any]:
    """float16 with a `GradScaler`, whose first scale overflows: the same bits, whether the step scales back or `unscale_`."""

    def scaled(stage: int, is_fused: bool, place: Any) -> Tensor:
        model = make_model(LLAMA).to(device)
        zero.shard_model(model, {"stage": stage, "compute_dtype": "float16", **BLOCKS, "offload": place})
        kind: dict[str, bool] = {"fused": True} if is_fused else {"foreach": False}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **kind)  # type: ignore[arg-type]
        scaler, found = torch.amp.GradScaler(device.type, init_scale=2.0**20), []
        for step in range(STEPS):
            loss = model(**batch_of(step, dist.get_rank(), device)).loss
            scaler.scale(loss).backward()
            if not is_fused:
                scaler.unscale_(optimizer)
                found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).to(device))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found += [loss.detach().float(), torch.tensor(scaler.get_scale(), device=device)]
        return torch.stack(found).cpu()

    for stage, is_fused in itertools.product((2, 3), (False, True)):
        expected = scaled(stage, is_fused, "none")
        for place in places(stage):
            found = scaled(stage, is_fused, place)
            assert alike(found, expected, device), (stage, is_fused, place, found, expected)
    return {}


def offload_in_chunks(device: torch.device) -> dict[str, Any]:
    """A step on the host comes to one unit after the other, as forwards do, and each goes up before the next is stepped on."""
    if device.type == "cpu":
        return {}
    for stage, dtype in itertools.product((1, 2, 3), ("float32", "bfloat16")):
        config = {"stage": stage, "compute_dtype": dtype}
        expected = trained(device, config).cpu()
        for place in places(stage):
            with patch.object(to_host, "_CHUNK_BYTES", 1), _recorded(device) as seen:
                found = trained(device, {**config, "offload": place}).cpu()
            assert alike(found, expected, device), (config, place, found, expected)
            _check_order(seen, stays_on_host=stage == 3 and place == ALL_ON_HOST)
    with (
        patch.object(to_host, "_CHUNK_BYTES", 1),
        patch.object(to_host.HostStep, "_done", lambda *_: None),  # all go up at the end: this is to be seen
        _recorded(device) as seen,
    ):
        assert alike(trained(device, {**config, "offload": HOST}).cpu(), expected, device)
    with pytest.raises(AssertionError):
        _check_order(seen, stays_on_host=False)
    return {}


@contextlib.contextmanager
def _recorded(device: torch.device) -> Iterator[list[tuple[str, int]]]:
    """What is stepped on, and what is copied for the way up: with how much was queued on the device before."""
    seen: list[tuple[str, int]] = []
    counts = getattr(torch.get_device_module(device), "counts", lambda: {"tasks of the computation": len(seen)})
    step, refresh = torch._fused_adamw_, HostRows.refresh

    def stepped(*args: Any, **kwargs: Any) -> None:
        seen.append(("step", counts()["tasks of the computation"]))
        step(*args, **kwargs)
        seen.append(("stepped", counts()["tasks of the computation"]))

    def refreshed(rows: HostRows, param: Tensor) -> None:
        seen.append(("refresh", counts()["tasks of the computation"]))
        refresh(rows, param)

    with patch.object(torch, "_fused_adamw_", stepped), patch.object(HostRows, "refresh", refreshed):
        yield seen


def _check_order(seen: list[tuple[str, int]], stays_on_host: bool) -> None:
    steps = [place for place, (kind, _) in enumerate(seen) if kind == "step"]
    num_chunks = len(steps) // STEPS
    assert num_chunks > 3, seen
    steps = steps[-num_chunks * STEPS :]  # behind those on tiny parameters, that tell which states there will be
    for number, (before, after) in enumerate(itertools.pairwise(steps)):
        if (number + 1) % num_chunks:
            assert "refresh" in [kind for kind, _ in seen[before + 2 : after]], seen[before : after + 1]
            assert stays_on_host or seen[after][1] > seen[before + 1][1], seen[before : after + 1]


def offload_threads(device: torch.device) -> dict[str, Any]:
    """A step on the host takes this process's share of the cores, fused also on one rank, and gives them back."""
    if device.type == "cpu":
        return {}
    seen: list[int] = []
    for stage in (1, 3):
        model = make_model(LLAMA).to(device)
        zero.shard_model(model, {"stage": stage, **BLOCKS, "offload": HOST})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = torch.optim.AdamW.step.__wrapped__  # type: ignore[attr-defined]
        before = torch.get_num_threads()
        with (
            patch.object(host_cores, "share_of_cores", lambda: 2),
            patch.object(type(optimizer), "step", torch.optim.Optimizer.profile_hook_step(_counted(step, seen))),
        ):
            model(**batch_of(0, dist.get_rank(), device)).loss.backward()
            optimizer.step()
        assert seen and set(seen) == {2 if before == 1 else before}, seen
        assert torch.get_num_threads() == before
        assert all(group["fused"] for group in optimizer.param_groups)
    return {}


def _counted(step: Any, seen: list[int]) -> Any:
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(self.param_groups[0]["params"]) > 1:  # not on a tiny one, to see which states there will be
            seen.append(torch.get_num_threads())
        return step(self, *args, **kwargs)

    return counted


def offload_let_go(device: torch.device) -> dict[str, Any]:
    """The memory of a model that goes right after its step is not written to when it belongs to somebody else."""
    if device.type == "cpu":
        return {}
    for stage in (1, 2, 3):
        for place in places(stage):
            model = make_model(LLAMA).to(device)
            zero.shard_model(model, {**BLOCKS, "stage": stage, "offload": place})
            engine, optimizer = zero.engine_of(model), adamw(model)
            assert engine is not None
            model(**batch_of(0, dist.get_rank(), device)).loss.backward()
            torch.accelerator.synchronize()
            optimizer.step()
            sizes = [unit.buffer_nbytes for unit in engine.units]
            sizes += [p.host.kept.nbytes for p in engine.parameters if p.host is not None and p.host.kept is not None]
            del model, engine, optimizer
            gc.collect()
            others = [torch.full((size,), 7, dtype=torch.uint8, device=device) for size in sizes for _ in range(2)]
            torch.accelerator.current_stream(device).synchronize()
            dist.barrier()
            time.sleep(0.6)  # what else is under way arrives
            assert all(bool((other == 7).all()) for other in others), (stage, place)
    return {}


OF_TWO = (
    offload_let_go,
    offload,
    offload_in_chunks,
    offload_threads,
    offload_scaled,
    offload_in_parts,
    offload_is_refused,
    offload_resumed,
)
